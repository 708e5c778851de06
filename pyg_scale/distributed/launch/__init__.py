"""The start of a job: its ranks, their places on the machines, and how they meet."""
