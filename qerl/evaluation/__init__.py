"""How good a policy is: samples, statistics, and reports that claim no more than they show."""
