"""``perdure demo``: an agent works on a real small project while its process is killed nine times.

project.py is the material and the work to do; agent.py is the process that gets killed; space.py is where it works;
parent.py kills the process, its Space's daemon and the Space itself, and tells the story; judge.py counts at the end,
from the files alone.
"""
