"""``perdure demo``: an agent works on a real small project while its process is killed nine times.

project.py is the material and the work to do; agent.py is the process that gets killed; parent.py kills it and tells
the story; judge.py counts at the end, from the files alone.
"""
