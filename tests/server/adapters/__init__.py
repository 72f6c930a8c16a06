"""Other APIs at the server, as their own clients see them."""
