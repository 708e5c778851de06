"""Features of nodes and edges on any rank."""
