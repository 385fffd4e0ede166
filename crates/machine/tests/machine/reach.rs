//! Runs in the machine: tries its control ports from a VM's position in the network.

use dayfly_machine::guest::{InterfaceMover, set_address, set_up};
use rustix::thread::UnshareFlags;
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Command, ExitCode};
use std::time::Duration;

/// The ports of the API, of exec, and of published ports.
const PORTS: [u16; 4] = [1024, 1025, 1026, 1027];
/// The first namespace's address on the link, which is also a local address there.
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 1);
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 2);
const MASK: Ipv4Addr = Ipv4Addr::new(255, 255, 0, 0);
/// Timeout for a SYN that is dropped; a refusal comes at once.
const TIMEOUT: Duration = Duration::from_secs(3);

fn busybox(words: &str) {
    let status = Command::new("busybox").args(words.split(' ')).status().unwrap();
    assert!(status.success(), "{words}");
}

fn connect(address: Ipv4Addr, port: u16) -> std::io::Result<TcpStream> {
    TcpStream::connect_timeout(&SocketAddr::from((address, port)), TIMEOUT)
}

/// Makes a namespace with a link into the first one. Fails if a control port answers in either
/// namespace. A listener that is made for comparison must answer.
pub(crate) fn from_behind_a_link(addresses: &[String]) -> ExitCode {
    let addresses: Vec<Ipv4Addr> = addresses.iter().map(|a| a.parse().unwrap()).collect();
    let compared = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    let port = compared.local_addr().unwrap().port();
    std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
    // Busybox lets the kernel choose the name of the other end.
    busybox("ip link add outside type veth");
    let inside = std::fs::read_dir("/sys/class/net")
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .find(|name| name.starts_with("veth"))
        .expect("the other end of the link");
    set_address("outside", GATEWAY, MASK).unwrap();
    set_up("outside").unwrap();
    let mut good = answers_nowhere("the first namespace", &addresses);
    let guest = std::thread::spawn(move || {
        let mover = InterfaceMover::new().unwrap();
        // SAFETY: NEWNET leaves the table of descriptors alone.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
        mover.move_to(&inside, File::open("/proc/thread-self/ns/net").unwrap()).unwrap();
        set_address(&inside, GUEST, MASK).unwrap();
        set_up(&inside).unwrap();
        busybox(&format!("ip route add default via {GATEWAY}"));
        let compared = SocketAddr::from((GATEWAY, port));
        TcpStream::connect_timeout(&compared, Duration::from_secs(240))
            .expect("the listener that is made for comparison");
        answers_nowhere("a VM's namespace", &addresses)
    });
    good &= guest.join().unwrap();
    // The link may have gone with the namespace of its other end.
    drop(Command::new("busybox").args(["ip", "link", "del", "outside"]).status());
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn answers_nowhere(from: &str, addresses: &[Ipv4Addr]) -> bool {
    let mut good = true;
    for address in addresses.iter().chain(&[GATEWAY]) {
        for port in PORTS {
            let got = connect(*address, port);
            good &= got.is_err();
            let text = got.map_or_else(|e| e.to_string(), |_| "ANSWERS".to_owned());
            println!("{from} to {address}:{port}: {text}");
        }
    }
    good
}
