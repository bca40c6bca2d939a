"""What every API shares: from a body to requests, from deltas to text; failover, journals, admission, usage."""
