"""The run-time type checker the tests use: an int is good wherever a float is."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
