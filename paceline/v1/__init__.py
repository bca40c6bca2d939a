"""Generated from `proto/paceline/v1` by `make proto`; read the contract there."""
