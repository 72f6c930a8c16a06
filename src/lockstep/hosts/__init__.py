"""Several hosts: Ray places device workers and restarts them; gateways connect to them and balance requests over
them."""
