//! A tiny HTTP server whose answers are bytes, so that they can be wrong in any way.

use crate::Reference;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// A request as it arrived.
#[derive(Debug, Clone)]
pub struct Asked {
    pub method: String,
    pub target: String,
    /// By their names in lower case.
    pub headers: BTreeMap<String, String>,
    pub body: String,
}

impl Asked {
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }

    /// The first byte that a range asks for.
    pub fn from(&self) -> usize {
        let range = self.header("range").strip_prefix("bytes=").unwrap_or("0-");
        range.trim_end_matches('-').parse().unwrap()
    }
}

/// What follows the bytes of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    Close,
    /// The connection stays open without a further byte.
    Stall,
    /// The last bytes come again without end.
    Again,
}

#[derive(Debug, Clone)]
pub struct Reply {
    pub bytes: Vec<u8>,
    pub then: Then,
}

impl Reply {
    /// An answer with these headers (each ended by `\r\n`) and its length.
    pub fn new(status: &str, headers: &str, body: impl AsRef<[u8]>) -> Self {
        let body = body.as_ref();
        let head = format!("HTTP/1.1 {status}\r\n{headers}Content-Length: {}\r\n\r\n", body.len());
        Self::raw([head.as_bytes(), body].concat())
    }

    pub fn ok(body: impl AsRef<[u8]>) -> Self {
        Self::new("200 OK", "", body)
    }

    pub fn status(status: &str) -> Self {
        Self::new(status, "", "")
    }

    pub fn redirect(to: &str) -> Self {
        Self::new("307 Temporary Redirect", &format!("Location: {to}\r\n"), "")
    }

    pub fn raw(bytes: impl Into<Vec<u8>>) -> Self {
        Self { bytes: bytes.into(), then: Then::Close }
    }

    pub fn then(self, then: Then) -> Self {
        Self { then, ..self }
    }

    /// The answer to a request for `whole`, or for its end.
    pub fn range(asked: &Asked, whole: &[u8]) -> Self {
        match asked.from() {
            0 => Self::ok(whole),
            from => {
                let range =
                    format!("Content-Range: bytes {from}-{}/{}\r\n", whole.len() - 1, whole.len());
                Self::new("206 Partial Content", &range, &whole[from..])
            }
        }
    }
}

/// A server on 127.0.0.1, which is insecure by name and so is asked over http.
pub struct Server {
    pub port: u16,
    log: Arc<Mutex<Vec<Asked>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
    pub async fn start(answer: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let log = Arc::new(Mutex::new(Vec::new()));
        let (answer, noted) = (Arc::new(answer), Arc::clone(&log));
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (answer, noted) = (Arc::clone(&answer), Arc::clone(&noted));
                tokio::spawn(async move {
                    // The client may end the connection at any time.
                    let _ = serve(stream, &*answer, &noted).await;
                });
            }
        });
        Self { port, log, task }
    }

    pub fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub fn image(&self, name: &str) -> Reference {
        format!("{}/{name}", self.host()).parse().unwrap()
    }

    /// The requests so far, without those that find out whether there is TLS.
    pub fn asked(&self) -> Vec<Asked> {
        let all = self.log.lock().unwrap();
        all.iter()
            .filter(|asked| !asked.target.starts_with("/v2/?") && asked.target != "/v2/")
            .cloned()
            .collect()
    }
}

async fn serve(
    mut stream: TcpStream,
    answer: &(dyn Fn(&Asked) -> Reply + Send + Sync),
    log: &Mutex<Vec<Asked>>,
) -> std::io::Result<()> {
    let mut bytes = Vec::new();
    let head = loop {
        if stream.read_buf(&mut bytes).await? == 0 {
            return Ok(());
        }
        // A TLS handshake, which ends as at a server without TLS.
        if bytes[0] == 0x16 {
            return Ok(());
        }
        if let Some(end) = bytes.windows(4).position(|w| w == b"\r\n\r\n") {
            break end;
        }
    };
    let text = String::from_utf8_lossy(&bytes[..head]).into_owned();
    let mut lines = text.lines();
    let mut words = lines.next().unwrap_or_default().split(' ').map(str::to_owned);
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let headers: BTreeMap<String, String> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
        .collect();
    let length: usize = headers.get("content-length").map_or(0, |text| text.parse().unwrap());
    while bytes.len() < head + 4 + length {
        if stream.read_buf(&mut bytes).await? == 0 {
            return Ok(());
        }
    }
    let body = String::from_utf8_lossy(&bytes[head + 4..]).into_owned();
    let asked = Asked { method, target, headers, body };
    log.lock().unwrap().push(asked.clone());
    let is_probe = asked.target.starts_with("/v2/?") || asked.target == "/v2/";
    let reply = if is_probe { Reply::ok("{}") } else { answer(&asked) };
    stream.write_all(&reply.bytes).await?;
    match reply.then {
        // Without the half that writes, the client sees the end after all bytes.
        Then::Close => stream.shutdown().await,
        Then::Stall => stream.read_buf(&mut bytes).await.map(drop),
        Then::Again => loop {
            let last = &reply.bytes[reply.bytes.len().saturating_sub(4096)..];
            stream.write_all(last).await?;
        },
    }
}
