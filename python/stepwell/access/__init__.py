"""Who may touch a weight while a step runs. Knows torch, and no optimizer."""
