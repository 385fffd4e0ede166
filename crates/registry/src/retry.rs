//! How often and when a request is made again.

use crate::error::RegistryError;
use std::time::Duration;

/// The bounds of repeated requests.
#[derive(Debug, Clone, Copy)]
pub struct Policy {
    /// Attempts without progress before an error is final.
    pub attempts: u32,
    /// The pause before the second attempt; each further pause is twice as long.
    pub pause: Duration,
    /// The longest pause, also if a registry asks for a longer one.
    pub longest_pause: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            attempts: 5,
            pause: Duration::from_millis(500),
            longest_pause: Duration::from_secs(30),
        }
    }
}

impl Policy {
    /// The pause after the failed attempt number `attempt` (from 1), if a further attempt makes
    /// sense after `error`.
    pub(crate) fn after(&self, attempt: u32, error: &RegistryError) -> Option<Duration> {
        if !error.is_passing() || attempt >= self.attempts {
            return None;
        }
        let doubled = self.pause.saturating_mul(1 << (attempt - 1).min(16));
        let asked = match error {
            RegistryError::Status { wait_s, .. } => wait_s.map(Duration::from_secs),
            _ => None,
        };
        Some(asked.unwrap_or_default().max(doubled).min(self.longest_pause))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_and_end_and_a_registry_cannot_ask_for_days() {
        let policy = Policy::default();
        let status = |wait_s, retry| RegistryError::Status {
            url: String::new(),
            expected: "200",
            status: "429".into(),
            message: String::new(),
            retry,
            wait_s,
        };
        let pause = |attempt, error| policy.after(attempt, &error).map(|p| p.as_millis());
        assert_eq!(pause(1, status(None, true)), Some(500));
        assert_eq!(pause(4, status(None, true)), Some(4_000));
        assert_eq!(pause(5, status(None, true)), None);
        assert_eq!(pause(1, status(Some(7), true)), Some(7_000));
        assert_eq!(pause(1, status(Some(u64::MAX), true)), Some(30_000));
        assert_eq!(pause(1, status(Some(1), false)), None);
    }
}
