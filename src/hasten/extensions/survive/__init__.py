"""Extension: runs that continue when replicas are lost."""
