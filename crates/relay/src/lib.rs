//! # relay
//!
//! Passes bytes between the published ports of one VM and its guest: a process in the VM's control
//! group, so that the VM pays for them, and not the daemon.
//!
//! ```text
//! client ─▶ listener, bound by the daemon ─▶ dayfly-relay ─▶ socket ─▶ address of the guest
//! ```
//!
//! # The program
//!
//! ```text
//! dayfly-relay --guest ADDRESS --vmm FD --connections N --flows N [--user UID] [--buffer BYTES]
//!              KIND:FD:PORT...
//! ```
//!
//! | argument | meaning |
//! |---|---|
//! | `--guest ADDRESS` | IPv4 address of the guest |
//! | `--vmm FD` | pidfd of the VMM; the program ends with status 0 when it is readable |
//! | `--connections N` | most connections at a time, 1 to 1024 |
//! | `--flows N` | most flows of UDP at a time, 1 to 1024 |
//! | `--user UID` | user and group to become; required if the program runs as root |
//! | `--buffer BYTES` | SO_RCVBUF and SO_SNDBUF of each socket; if absent, the kernel's choice |
//! | `tcp:FD:PORT` | a listener whose connections go to the guest's TCP port |
//! | `udp:FD:PORT` | a bound socket whose datagrams go to the guest's UDP port |
//! | `framed:FD:PORT` | a listener; each connection has the datagrams of a flow ([`framed`]) |
//!
//! All descriptors are inherited, and have numbers from 3 on. The program keeps no state: any
//! signal may end it at any time. Its connections end with it, as do its flows. The listeners stay
//! if another process has them too.
//!
//! # What bounds clients and guest
//!
//! | | bound | past it |
//! |---|---|---|
//! | connections | `--connections` | reset at once |
//! | time until the guest accepts | [`tcp::CONNECT`] | reset |
//! | bytes of a direction between its sockets | one pipe, while it has bytes | the sender waits |
//! | bytes before other connections have their turn | [`tcp::TURN_BYTES`] | |
//! | flows | `--flows`, [`udp::MAX_FLOWS_OF_PORT`] of one port | further clients' datagrams drop |
//! | idle flows | [`udp::ONCE`], [`udp::LASTING`] | end |
//!
//! # If a client or a guest takes it over
//!
//! The process holds the ports, the connections, and the VMM's pidfd. It can open no file, make no
//! process, and signal none. It can make sockets, but connect them to the guest's published ports
//! only: the filter of system calls compares the *pointer* of connect(2) with a table of addresses
//! that no system call of the filter can change ([`guests`]). It can send datagrams to any address
//! from a published UDP port, because that is how clients get their answers; a relay without UDP
//! ports cannot.
//!
//! | module | concern |
//! |---|---|
//! | [`arguments`], [`start`], [`jail`], [`filter`] | the program, its jail, its system calls |
//! | [`guests`] | the addresses that the process may connect to |
//! | [`serve`](mod@serve) | the loop |
//! | [`tcp`], [`pipes`] | connections |
//! | [`streams`] | `--streams`: passes bytes between clients and the guest's agent |
//! | [`udp`], [`framed`] | flows |
//! | [`table`] | numbered entries |

pub mod arguments;
pub mod filter;
pub mod framed;
pub mod guests;
pub mod jail;
pub mod pipes;
pub mod serve;
pub mod start;
pub mod streams;
pub mod table;
pub mod tcp;
pub mod udp;
