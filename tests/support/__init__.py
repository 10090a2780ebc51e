"""What several test files share: small networks and programs, training on a session, and a naive reference."""
