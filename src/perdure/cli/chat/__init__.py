"""``perdure chat``: a terminal chat over a store. Interrupted, killed, started again, it is where it was."""
