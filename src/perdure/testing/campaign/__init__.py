"""Crash campaigns: real processes, real SIGKILLs, and a judge that trusts nobody's word (rules P8 to P19).

script.py   the work: ten calls, and by a model of them what the workspace must be afterwards
tools.py    the tools of that work that the package does not ship
driver.py   one life of the process that is killed; watch.py: what it tells, and where it stands still
nursery.py  starts such processes quickly; world.py: the folder of a run, its processes, and what is done to them
play.py     one run: lives, attacks and gates, until the work is done
judge.py    what is true afterwards, from the files alone
tally.py    counts, the SUMMARY line, and what a campaign must have seen
transactional.py, steps.py, stale.py: the modes
campaign.py what ``perdure crash --mode ...`` calls
"""
