"""Any graph to a graph directory, in bounded memory."""
