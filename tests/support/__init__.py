"""Code shared by test files: small networks and programs, training on a session, and a naive reference."""
