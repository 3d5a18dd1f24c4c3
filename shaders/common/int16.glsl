// Two int16 packed in a word.
#ifndef INT16_GLSL
#define INT16_GLSL

uint int16_word(ivec2 pair) { return (uint(pair.x) & 0xffffu) | (uint(pair.y) << 16); }

ivec2 int16_pair(uint word) { return ivec2(int(word << 16) >> 16, int(word) >> 16); }

#endif
