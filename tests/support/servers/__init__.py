"""Servers on loopback: Hubs, web servers, a proxy, sshd."""
