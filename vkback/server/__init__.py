"""An HTTP server with the endpoints of OpenAI's API, on one model of one device. Needs the extra `vkback[serve]`."""
