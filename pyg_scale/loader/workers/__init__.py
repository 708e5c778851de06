"""The makers of batches: threads, processes and servers, and how far they work ahead."""
