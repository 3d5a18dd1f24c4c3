"""`python -m vkback`: the command line, where the folder of scripts is not in PATH. `python -m vkback bench` is vkbench."""

from vkback.cli.start import vkback

if __name__ == "__main__":
    vkback()
