"""The replay buffer: leases, groups, staleness and the ledger."""
