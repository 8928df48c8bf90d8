"""The virtual clock: how long rounds would take on clients' own devices and networks, and who would answer in time."""
