"""The README's pictures: a terminal, drawn from a recording, and the road at one look.

`python -m scripts.lib.pictures` draws docs/pictures/*.svg again. With `--record` it first runs the
commands in a real terminal (a minute) and writes docs/pictures/demo.cast, an asciicast.
"""
