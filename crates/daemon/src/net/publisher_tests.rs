use super::*;
use crate::net::publish::{Published, with_choice};
use dayfly_api::types::{ErrorCode, PortProtocol, Publish};
use dayfly_machine_init::RefusalKind;
use std::net::Ipv4Addr;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::net::TcpStream;

/// The supervisor's side of a connection.
struct Supervisor(BufReader<UnixStream>);

impl Supervisor {
    async fn connect(path: &Path) -> Self {
        Self(BufReader::new(UnixStream::connect(path).await.unwrap()))
    }

    async fn order(&mut self) -> PortOrder {
        let mut line = String::new();
        self.0.read_line(&mut line).await.unwrap();
        serde_json::from_str(&line).unwrap()
    }

    /// The next order, which must be for this port: its number, and where it leads.
    async fn bind(&mut self, port: u16) -> (u64, u16) {
        let order = self.order().await;
        let PortOrder::Bind { id, address, to, udp: false } = order else { panic!("{order:?}") };
        assert_eq!(address, SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        (id, to)
    }

    async fn answer(&mut self, id: u64, refused: Option<PortRefusal>) {
        // As a supervisor of an earlier version answers.
        self.say(&PortAnswer { id, refused, port: None }).await;
    }

    async fn say(&mut self, answer: &PortAnswer) {
        let line = format!("{}\n", serde_json::to_string(answer).unwrap());
        self.0.write_all(line.as_bytes()).await.unwrap();
    }
}

fn taken() -> Option<PortRefusal> {
    Some(PortRefusal { kind: RefusalKind::Taken, why: "Address in use".to_owned() })
}

const fn port(host_port: u16, guest_port: u16) -> Publish {
    Publish { host: None, host_port, guest_port, protocol: PortProtocol::Tcp }
}

/// A publisher that serves, and the folder with its socket.
fn publisher(stop: &CancellationToken) -> (Arc<Publisher>, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let publisher = Arc::<Publisher>::default();
    let listener = Publisher::listen(&folder.path().join("sock")).unwrap();
    tokio::spawn(publisher.clone().keep(listener, stop.clone()));
    (publisher, folder)
}

#[tokio::test]
async fn a_port_is_ordered_reaches_the_guest_and_is_freed() {
    let stop = CancellationToken::new();
    let (publisher, folder) = publisher(&stop);
    let guest = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let ports = [port(8080, guest.local_addr().unwrap().port())];
    let asked = tokio::spawn({
        let publisher = publisher.clone();
        async move { Published::ask_for(&with_choice(&ports, &[]), &publisher).await }
    });
    let mut supervisor = Supervisor::connect(&folder.path().join("sock")).await;
    let (id, to) = supervisor.bind(8080).await;
    supervisor.answer(id, None).await;
    let mut published = asked.await.unwrap().unwrap();
    published.connect_to(Ipv4Addr::LOCALHOST, crate::fixture::relay_place(folder.path()));
    let mut client = TcpStream::connect(("127.0.0.1", to)).await.unwrap();
    let (mut stream, _) = guest.accept().await.unwrap();
    stream.write_all(b"hello").await.unwrap();
    drop(stream);
    let mut said = String::new();
    client.read_to_string(&mut said).await.unwrap();
    assert_eq!(said, "hello");
    published.close();
    assert_eq!(supervisor.order().await, PortOrder::Free { id });
    assert!(lock(&publisher.0).held.is_empty());
    stop.cancel();
}

#[tokio::test]
async fn a_taken_port_is_named_and_a_request_that_ends_leaves_no_order() {
    let stop = CancellationToken::new();
    let (publisher, folder) = publisher(&stop);
    let mut supervisor = Supervisor::connect(&folder.path().join("sock")).await;
    let ports = [port(8080, 80), port(8081, 81)];
    let ask = || {
        let publisher = publisher.clone();
        tokio::spawn(async move { Published::ask_for(&with_choice(&ports, &[]), &publisher).await })
    };
    let asked = ask();
    let [first, second] = [supervisor.bind(8080).await.0, supervisor.bind(8081).await.0];
    supervisor.answer(second, taken()).await;
    supervisor.answer(first, None).await;
    let error = asked.await.unwrap().unwrap_err().0;
    assert_eq!(error.code, ErrorCode::Conflict);
    assert!(error.message.contains("port 8081 of the host: Address in use"), "{}", error.message);
    for id in [first, second] {
        assert_eq!(supervisor.order().await, PortOrder::Free { id });
    }
    // The client goes before the supervisor has answered.
    let asked = ask();
    let [first, second] = [supervisor.bind(8080).await.0, supervisor.bind(8081).await.0];
    asked.abort();
    assert!(asked.await.unwrap_err().is_cancelled());
    for id in [first, second] {
        assert_eq!(supervisor.order().await, PortOrder::Free { id });
    }
    // A late answer is ignored.
    supervisor.answer(first, taken()).await;
    assert!(lock(&publisher.0).held.is_empty());
    stop.cancel();
}

#[tokio::test]
async fn a_supervisor_that_connects_anew_gets_the_orders_that_hold() {
    let stop = CancellationToken::new();
    let (publisher, folder) = publisher(&stop);
    let path = folder.path().join("sock");
    let adopted = Published::again(&[port(8080, 80)], &publisher).unwrap();
    let gone = Published::again(&[port(8081, 80)], &publisher).unwrap();
    drop(gone);
    let mut supervisor = Supervisor::connect(&path).await;
    let (id, to) = supervisor.bind(8080).await;
    // No request waits, so a refusal is only logged.
    supervisor.answer(id, taken()).await;
    drop(supervisor);
    let mut supervisor = Supervisor::connect(&path).await;
    assert_eq!(supervisor.bind(8080).await, (id, to));
    // Words that are no answer end the connection, and no order.
    supervisor.0.write_all(b"nonsense\n").await.unwrap();
    let mut rest = String::new();
    supervisor.0.read_to_string(&mut rest).await.unwrap();
    assert_eq!(rest, "");
    let mut supervisor = Supervisor::connect(&path).await;
    assert_eq!(supervisor.bind(8080).await, (id, to));
    drop(adopted);
    assert_eq!(supervisor.order().await, PortOrder::Free { id });
    stop.cancel();
}

/// Where a UDP port without a choice, that was 5353 before, is ordered.
async fn asked_again(
    publisher: &Arc<Publisher>,
) -> tokio::task::JoinHandle<crate::base::error::Outcome<Published>> {
    let port = Publish { protocol: PortProtocol::Udp, ..port(0, 53) };
    let ports = with_choice(&[port], &[Publish { host_port: 5353, ..port }]);
    let publisher = publisher.clone();
    tokio::spawn(async move { Published::ask_for(&ports, &publisher).await })
}

#[tokio::test]
async fn a_free_port_is_the_earlier_one_or_one_that_the_host_chooses_and_stays() {
    let stop = CancellationToken::new();
    let (publisher, folder) = publisher(&stop);
    let path = folder.path().join("sock");
    let mut supervisor = Supervisor::connect(&path).await;
    let asked = asked_again(&publisher).await;
    let order = supervisor.order().await;
    let PortOrder::Bind { id, address, udp: true, .. } = order else { panic!("{order:?}") };
    assert_eq!(address.port(), 5353);
    supervisor.answer(id, taken()).await;
    let order = supervisor.order().await;
    let PortOrder::Bind { id: second, address, udp: true, .. } = order else { panic!("{order:?}") };
    assert_eq!(address.port(), 0);
    assert_eq!(supervisor.order().await, PortOrder::Free { id });
    supervisor.say(&PortAnswer { id: second, refused: None, port: Some(40_000) }).await;
    let published = asked.await.unwrap().unwrap();
    assert_eq!(published.ports()[0].host_port, 40_000);
    // A supervisor that connects anew gets an order for the port that was chosen.
    drop(supervisor);
    let mut supervisor = Supervisor::connect(&path).await;
    let order = supervisor.order().await;
    let PortOrder::Bind { id, address, udp: true, .. } = order else { panic!("{order:?}") };
    assert_eq!((id, address.port()), (second, 40_000));
    drop(published);
    assert_eq!(supervisor.order().await, PortOrder::Free { id });
    // A supervisor of an earlier version would have bound a port of TCP.
    let asked = asked_again(&publisher).await;
    for expected in [5353, 0] {
        let order = supervisor.order().await;
        let PortOrder::Bind { id, address, .. } = order else { panic!("{order:?}") };
        assert_eq!(address.port(), expected);
        supervisor.answer(id, None).await;
    }
    let error = asked.await.unwrap().unwrap_err().0;
    assert!(error.message.contains("dayfly machine restart"), "{}", error.message);
    stop.cancel();
}
