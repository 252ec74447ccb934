"""``perdure approvals``: calls that wait for a person's word, decided from another terminal; and rules in its place."""
