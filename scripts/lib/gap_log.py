"""Logs each packet that would leave a closed network: `gap_log.py DEVICE FILE`. Needs CAP_NET_RAW.

DEVICE is the end of the default route; nothing answers there. One line per packet: source,
destination, protocol, port, and for DNS the name in question. scripts/slurm-site uses it. Linux,
standard library only.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys

ETHERTYPE_IPV4 = 0x0800
PROTOCOLS = {1: "icmp", 6: "tcp", 17: "udp"}
DNS_PORT = 53


def describe(packet: bytes) -> str:
    """Describes one IPv4 packet: `10.77.0.1 -> 192.0.2.53 udp 53 huggingface.co`."""
    header = (packet[0] & 0x0F) * 4
    protocol = PROTOCOLS.get(packet[9], str(packet[9]))
    source, destination = (ipaddress.IPv4Address(packet[start : start + 4]) for start in (12, 16))
    words = [str(source), "->", str(destination), protocol]
    if protocol in ("tcp", "udp") and len(packet) >= header + 4:
        port = struct.unpack_from("!H", packet, header + 2)[0]
        words.append(str(port))
        if protocol == "udp" and port == DNS_PORT:
            words.append(question(packet[header + 8 :]))
    return " ".join(words)


def question(message: bytes) -> str:
    """The first name in the question section of a DNS message (RFC 1035, 4.1.2)."""
    labels, here = [], 12
    while here < len(message) and message[here]:
        end = here + 1 + message[here]
        labels.append(message[here + 1 : end].decode("ascii", "replace"))
        here = end
    return ".".join(labels)


def main(device: str, path: str) -> None:
    """Listens until it is killed."""
    ipv4 = socket.htons(ETHERTYPE_IPV4)
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, ipv4) as listener:
        listener.bind((device, ETHERTYPE_IPV4))
        # The file appears when the socket listens: scripts/slurm-site waits for it.
        with open(path, "a", encoding="utf-8", buffering=1) as log:
            while True:
                packet = listener.recv(65535)
                if len(packet) >= 20:
                    print(describe(packet), file=log)


if __name__ == "__main__":
    main(*sys.argv[1:])
