"""Several hosts: Ray places device workers and watches them; gateways speak to them and balance over them"""
