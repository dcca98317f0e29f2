"""What `qerl doctor` looks at: the machine, the packages, and every kernel against its reference on this card."""
