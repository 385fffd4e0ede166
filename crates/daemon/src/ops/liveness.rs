//! Checks that a guest's agent still answers while a program runs.
//!
//! A program may be silent for any time, and the connection to a guest whose kernel has hung stays
//! open. So after a silence the agent is asked for its `Stat`. Only two missing answers in a row
//! end the wait. A guest that is paused cannot answer, and is not asked.

use crate::base::error::{ApiError, Outcome};
use crate::model::state::Phase;
use crate::vm::Vm;
use crate::vmm::agent_link;
use dayfly_api::types::ErrorCode;
use dayfly_relay::streams::message::Heard;
use dayfly_units::Name;
use std::path::PathBuf;
use std::time::Duration;
use tokio::time::timeout;

/// Silence after which the agent is asked, unless the client has set another.
const SILENCE: Duration = Duration::from_secs(30);
/// The shortest silence that a client can set, because each question is a connection to the agent.
const SHORTEST: Duration = Duration::from_millis(10);

/// Counts the bytes of an agent.
pub trait Hears: Sync {
    /// What has come so far.
    fn heard(&self) -> impl Future<Output = Heard> + Send;
}

/// No bytes.
struct Nothing;

impl Hears for Nothing {
    async fn heard(&self) -> Heard {
        Heard::default()
    }
}

/// The check of one program's agent.
pub struct Liveness<'a> {
    vm: &'a Name,
    socket: PathBuf,
    /// `None`: the client has turned the check off.
    silence: Option<Duration>,
    within: Duration,
    /// Whether the guest runs, and so can answer.
    runs: Box<dyn Fn() -> bool + Send + Sync + 'a>,
}

impl<'a> Liveness<'a> {
    /// A check of the agent of `vm`, which may take `within` for an answer. `silence_ms` is from
    /// the client: 0 turns the check off.
    pub fn new(vm: &'a Vm, silence_ms: Option<u64>, within: Duration) -> Self {
        Self {
            vm: &vm.name,
            socket: vm.dir.vsock(),
            silence: silence(silence_ms),
            within,
            runs: Box::new(|| {
                matches!(vm.phase(), Phase::Running | Phase::Forking) && vm.no_space().is_none()
            }),
        }
    }

    /// Waits for `next`, which comes from the agent.
    ///
    /// # Errors
    /// The agent did not answer twice in a row.
    pub async fn wait<T>(&self, next: impl Future<Output = T>) -> Outcome<T> {
        self.wait_hearing(next, &Nothing).await
    }

    /// As [`Self::wait`]. Bytes of the agent that `hears` counts are a sign of life.
    ///
    /// # Errors
    /// As [`Self::wait`].
    pub async fn wait_hearing<T>(
        &self,
        next: impl Future<Output = T>,
        hears: &impl Hears,
    ) -> Outcome<T> {
        let mut next = std::pin::pin!(next);
        let Some(silence) = self.silence else { return Ok(next.await) };
        let (mut missed, mut before) = (false, 0);
        loop {
            if let Ok(got) = timeout(silence, &mut next).await {
                return Ok(got);
            }
            // What comes meanwhile matters more than any answer.
            let now = tokio::select! {
                biased;
                got = &mut next => return Ok(got),
                now = hears.heard() => now.bytes,
            };
            if std::mem::replace(&mut before, now) != now || !(self.runs)() {
                missed = false;
                continue;
            }
            let asked = tokio::select! {
                biased;
                got = &mut next => return Ok(got),
                asked = agent_link::stat(&self.socket, self.within) => asked,
            };
            match asked {
                Ok(_) => missed = false,
                Err(_) if !(self.runs)() => missed = false,
                Err(_) if !missed => missed = true,
                Err(e) => return Err(self.silent(&e)),
            }
        }
    }

    fn silent(&self, last: &agent_link::LinkError) -> ApiError {
        let text = format_args!(
            "VM {0}: expected an answer of its agent while a program runs, got none twice in a row \
             ({last}); its kernel may have hung: `dayfly logs {0}` shows its console, \
             `dayfly exec --liveness 0` does not ask",
            self.vm
        );
        ApiError::new(ErrorCode::Timeout, text)
    }
}

fn silence(asked_ms: Option<u64>) -> Option<Duration> {
    match asked_ms {
        None => Some(SILENCE),
        Some(0) => None,
        Some(ms) => Some(Duration::from_millis(ms).max(SHORTEST)),
    }
}

/// The clock stands still while anything else can happen.
#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixListener;
    use tokio::sync::oneshot;

    struct Counted<'a>(&'a AtomicU64);

    impl Hears for Counted<'_> {
        async fn heard(&self) -> Heard {
            Heard { bytes: self.0.load(Ordering::SeqCst), waits: true }
        }
    }

    fn check<'a>(vm: &'a Name, socket: PathBuf, runs: &'a AtomicBool) -> Liveness<'a> {
        Liveness {
            vm,
            socket,
            silence: Some(Duration::from_millis(5)),
            within: Duration::from_millis(50),
            runs: Box::new(|| runs.load(Ordering::SeqCst)),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_that_answers_no_more_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("agent");
        let listener = UnixListener::bind(&socket).unwrap();
        let (vm, runs) = ("quiet".parse().unwrap(), AtomicBool::new(true));
        let check = check(&vm, socket, &runs);
        assert_eq!(check.wait(std::future::ready(7)).await.unwrap(), 7);

        // One missing answer does not end the wait.
        let (say, said) = oneshot::channel();
        let agent = async {
            drop(listener.accept().await.unwrap());
            say.send(8).unwrap();
        };
        let (got, ()) = tokio::join!(check.wait(said), agent);
        assert_eq!(got.unwrap(), Ok(8));

        // This agent accepts connections, but does not answer.
        let error = check.wait(std::future::pending::<()>()).await.unwrap_err();
        assert_eq!(error.0.code, ErrorCode::Timeout);
        assert!(error.to_string().contains("VM quiet"), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_paused_guest_is_not_asked_and_its_silence_does_not_count() {
        let folder = tempfile::tempdir().unwrap();
        // There is no agent, so each question fails.
        let socket = folder.path().join("agent");
        let (vm, runs) = ("paused".parse().unwrap(), AtomicBool::new(false));
        // It runs after it was seen paused many times.
        let looks = AtomicU64::new(0);
        let mut check = check(&vm, socket, &runs);
        check.runs = Box::new(|| {
            looks.fetch_add(1, Ordering::SeqCst);
            runs.load(Ordering::SeqCst)
        });
        let resumed = async {
            while looks.load(Ordering::SeqCst) < 20 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            runs.store(true, Ordering::SeqCst);
        };
        let mut end = std::pin::pin!(check.wait(std::future::pending::<()>()));
        tokio::select! {
            biased;
            () = resumed => {}
            end = &mut end => panic!("the wait ended while it was paused: {end:?}"),
        }
        assert_eq!(end.await.unwrap_err().0.code, ErrorCode::Timeout);
    }

    #[tokio::test(start_paused = true)]
    async fn output_is_a_sign_of_life_and_no_question_is_asked_then() {
        let folder = tempfile::tempdir().unwrap();
        let (vm, runs) = ("busy".parse().unwrap(), AtomicBool::new(true));
        let check = check(&vm, folder.path().join("agent"), &runs);
        let (mut near, mut far) = tokio::io::duplex(64);
        let heard = AtomicU64::new(0);
        let reading = async {
            let mut all = 0;
            while let Ok(count @ 1..) = near.read(&mut [0; 8]).await {
                all += count;
                heard.fetch_add(1, Ordering::SeqCst);
            }
            all
        };
        // Each silence is shorter than the limit, all together are longer. Without output the
        // agent, which does not exist, would be asked, and the wait would end with an error.
        let writing = async {
            for _ in 0..200 {
                far.write_all(b"x").await.unwrap();
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            drop(far);
        };
        let counted = Counted(&heard);
        let (got, ()) = tokio::join!(check.wait_hearing(reading, &counted), writing);
        assert_eq!(got.unwrap(), 200);
    }

    #[test]
    fn a_client_can_turn_the_check_off_or_set_it_within_a_bound() {
        assert_eq!(silence(None), Some(SILENCE));
        assert_eq!(silence(Some(0)), None);
        assert_eq!(silence(Some(1)), Some(SHORTEST));
        assert_eq!(silence(Some(60_000)), Some(Duration::from_secs(60)));
    }
}
