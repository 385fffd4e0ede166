//! The program in its jail: it serves, holds no rights, and ends with its VM.

use crate::common;
use dayfly_relay::arguments::Kind;
use rustix::io::{FdFlags, fcntl_setfd};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};

const USER: u32 = 0x7100_0001;

fn inherited(fd: &OwnedFd) -> String {
    fcntl_setfd(fd, FdFlags::empty()).unwrap();
    fd.as_raw_fd().to_string()
}

fn started(vmm: &OwnedFd, ports: &[String], user: &str) -> Child {
    let bounds = ["--connections", "64", "--flows", "64", "--guest", "127.0.0.1", "--vmm"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_dayfly-relay"));
    command.args(bounds).arg(inherited(vmm)).args(["--user", user]).args(ports);
    command.stderr(Stdio::piped()).spawn().unwrap()
}

fn status(child: &Child, name: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn it_serves_in_its_jail_and_ends_with_its_vm() {
    assert!(rustix::process::geteuid().is_root(), "this test needs root");
    let (ended, vmm) = std::io::pipe().unwrap();
    let guest = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let datagrams = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let ((tcp_at, tcp), (udp_at, udp)) = (common::port(Kind::Tcp), common::port(Kind::Udp));
    let (framed_at, framed) = common::port(Kind::Framed);
    let (port, udp_port) =
        (guest.local_addr().unwrap().port(), datagrams.local_addr().unwrap().port());
    let ports = [
        format!("tcp:{}:{port}", inherited(&tcp)),
        format!("udp:{}:{udp_port}", inherited(&udp)),
        format!("framed:{}:{udp_port}", inherited(&framed)),
    ];
    let mut child = started(&ended.into(), &ports, &USER.to_string());
    // Clients connect, stall, end and reset, so that each system call is made under the filter.
    let mut client = TcpStream::connect(tcp_at).unwrap();
    let (mut server, _) = guest.accept().unwrap();
    client.write_all(&[1; 100_000]).unwrap();
    server.read_exact(&mut [0; 100_000]).unwrap();
    drop(client);
    assert_eq!(server.read(&mut [0]).unwrap(), 0);
    let client = TcpStream::connect(tcp_at).unwrap();
    let (mut server, _) = guest.accept().unwrap();
    rustix::net::sockopt::set_socket_linger(&client, Some(std::time::Duration::ZERO)).unwrap();
    drop(client);
    server.read(&mut [0]).unwrap_err();
    let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    client.send_to(b"?", udp_at).unwrap();
    let (_, flow) = datagrams.recv_from(&mut [0]).unwrap();
    datagrams.send_to(b"!", flow).unwrap();
    client.recv_from(&mut [0]).unwrap();
    let mut supervisor = TcpStream::connect(framed_at).unwrap();
    supervisor.write_all(&[0, 1, b'?']).unwrap();
    let (_, flow) = datagrams.recv_from(&mut [0]).unwrap();
    datagrams.send_to(&[2; 60_000], flow).unwrap();
    supervisor.read_exact(&mut [0; 60_002]).unwrap();
    // As many connections as there may be, and one more.
    let mut all = Vec::new();
    for _ in 0..63 {
        all.push((TcpStream::connect(tcp_at).unwrap(), guest.accept().unwrap()));
    }
    let mut more = TcpStream::connect(tcp_at).unwrap();
    let _ = more.read(&mut [0]);

    assert_eq!(status(&child, "Uid:"), [&*USER.to_string(); 4].join(" "));
    assert_eq!(status(&child, "Gid:"), [&*USER.to_string(); 4].join(" "));
    for name in ["CapEff:", "CapPrm:", "CapInh:"] {
        assert_eq!(status(&child, name), "0000000000000000");
    }
    assert_eq!(
        (status(&child, "Seccomp:"), status(&child, "NoNewPrivs:")),
        ("2".into(), "1".into())
    );
    assert_eq!(
        (status(&child, "Groups:"), status(&child, "Threads:")),
        (String::new(), "1".into())
    );
    let root = std::fs::read_link(format!("/proc/{}/root", child.id())).unwrap();
    assert!(root.ends_with("fdinfo"), "{root:?}");
    drop(vmm);
    assert!(child.wait().unwrap().success());
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(said, "");
}

#[test]
fn it_does_not_serve_as_root() {
    assert!(rustix::process::geteuid().is_root(), "this test needs root");
    let (ended, _vmm) = std::io::pipe().unwrap();
    let (_, tcp) = common::port(Kind::Tcp);
    let mut child = started(&ended.into(), &[format!("tcp:{}:80", inherited(&tcp))], "0");
    assert!(!child.wait().unwrap().success());
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.contains("expected --user"), "{said}");
}
