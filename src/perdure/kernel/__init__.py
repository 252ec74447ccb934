"""Floor 0: records, documents, transactions, the session and what may be observed of them."""
