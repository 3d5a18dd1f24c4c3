"""Ops that no model here uses: lines of llama.cpp's test-backend-ops reach them, and nothing else does."""
