//! Shows a step that takes longer than a second: a spinner or bar on a terminal, plain lines
//! elsewhere.

use crate::terminal_text::Filter;
use dayfly_units::{Bytes, sync::lock, text::escaped};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A shorter step is not shown.
const SHOWN_AFTER: Duration = Duration::from_secs(1);
/// Without a terminal, a long step is printed again at this interval.
const AGAIN_AFTER: Duration = Duration::from_secs(15);
const TICK: Duration = Duration::from_millis(100);
/// indicatif's template for a step without a total: its default would draw an empty bar, without
/// the message.
const SPINNER: &str = "{spinner} {msg}";
/// indicatif's template for a step with a known total.
const BAR: &str = "{spinner} [{bar:24}] {msg}";

/// The steps of a command, one at a time. Dropping the value ends the last step and clears its
/// spinner.
#[derive(Debug)]
pub struct Steps {
    shared: Arc<Shared>,
    ticker: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    woken: Condvar,
    terminal: bool,
}

#[derive(Debug, Default)]
struct State {
    step: Option<Step>,
    done: bool,
}

#[derive(Debug)]
struct Step {
    label: String,
    began: Instant,
    /// Bytes done, and bytes in total (0 if unknown); `None` without a report.
    bytes: Option<(u64, u64)>,
    /// Time of the last display; `None` before the first.
    shown: Option<Instant>,
    bar: Option<ProgressBar>,
}

impl Default for Steps {
    fn default() -> Self {
        Self::new()
    }
}

impl Steps {
    /// Makes a display without a step.
    #[must_use]
    pub fn new() -> Self {
        let terminal = std::io::stderr().is_terminal();
        let shared = Arc::new(Shared { state: Mutex::default(), woken: Condvar::new(), terminal });
        let ticking = Arc::clone(&shared);
        let ticker =
            std::thread::Builder::new().name("progress".into()).spawn(move || ticking.tick());
        // Without the thread nothing is shown, which is no reason to fail.
        Self { shared, ticker: ticker.ok() }
    }

    /// Begins a step and ends the previous one.
    pub fn begin(&self, label: impl Into<String>) {
        let mut state = self.shared.lock();
        self.shared.end(&mut state);
        let (began, label) = (Instant::now(), one_line(&label.into()));
        state.step = Some(Step { label, began, bytes: None, shown: None, bar: None });
    }

    /// Reports the step's progress in bytes. A `total` of 0 means that the total is unknown.
    pub fn bytes(&self, done: u64, total: u64) {
        if let Some(step) = &mut self.shared.lock().step {
            step.bytes = Some((done, total));
        }
    }

    /// Prints a line above the spinner. The text may come from a program in a guest, so it is
    /// filtered.
    pub fn say(&self, text: &str) {
        let text = filtered(text);
        let state = self.shared.lock();
        match state.step.as_ref().and_then(|s| s.bar.as_ref()) {
            Some(bar) => bar.suspend(|| eprintln!("{text}")),
            None => eprintln!("{text}"),
        }
    }

    /// Ends the step.
    pub fn end(&self) {
        let mut state = self.shared.lock();
        self.shared.end(&mut state);
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        self.shared.end(&mut state);
        state.done = true;
        drop(state);
        self.shared.woken.notify_all();
        if let Some(ticker) = self.ticker.take() {
            let _ = ticker.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A poisoned lock only affects the display, so the poison is ignored.
        lock(&self.state)
    }

    fn tick(&self) {
        let mut state = self.lock();
        while !state.done {
            if let Some(step) = &mut state.step {
                if self.terminal { step.draw() } else { step.print() }
            }
            state = self.woken.wait_timeout(state, TICK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn end(&self, state: &mut State) {
        if let Some(step) = state.step.take() {
            if let Some(bar) = step.bar {
                bar.finish_and_clear();
            }
            if !self.terminal && step.shown.is_some() {
                eprintln!("{}: {}", step.label, seconds(step.began.elapsed()));
            }
        }
    }
}

impl Step {
    fn draw(&mut self) {
        if self.began.elapsed() < SHOWN_AFTER {
            return;
        }
        let text = format!("{}{} ({})", self.label, self.share(), seconds(self.began.elapsed()));
        let bar = self.bar.get_or_insert_with(|| {
            ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr())
                .with_style(style(SPINNER))
        });
        match self.bytes {
            Some((done, total)) if total > 0 => {
                if bar.length() != Some(total) {
                    bar.set_length(total);
                    bar.set_style(style(BAR));
                }
                bar.set_position(done.min(total));
            }
            _ => {}
        }
        bar.set_message(text);
        bar.tick();
    }

    fn print(&mut self) {
        let due = match self.shown {
            None => self.began.elapsed() >= SHOWN_AFTER,
            Some(last) => last.elapsed() >= AGAIN_AFTER,
        };
        if due {
            let still = if self.shown.is_some() {
                format!(" ({})", seconds(self.began.elapsed()))
            } else {
                String::new()
            };
            eprintln!("{}…{}{still}", self.label, self.share());
            self.shown = Some(Instant::now());
        }
    }

    fn share(&self) -> String {
        match self.bytes {
            None => String::new(),
            Some((done, 0)) => format!(" {}", Bytes(done)),
            Some((done, total)) => format!(" {} of {}", Bytes(done.min(total)), Bytes(total)),
        }
    }
}

fn style(template: &str) -> ProgressStyle {
    let style = ProgressStyle::with_template(template);
    style.map_or_else(|_| ProgressStyle::default_spinner(), |style| style.progress_chars("=> "))
}

/// The first line of a label, cut to fit beside the figures. A label may contain the whole text of
/// a warm-up.
fn one_line(label: &str) -> String {
    const LONGEST: usize = 90;
    let line = label.lines().next().unwrap_or_default();
    // A longer text is cut below.
    let shown = escaped(line, LONGEST + 1).to_string();
    let short: String = shown.chars().take(LONGEST).collect();
    let whole = line.len() == label.len() && short.len() == shown.len();
    if whole { short } else { format!("{} ...", short.trim_end()) }
}

/// A piece of a program's output, filtered for a terminal.
fn filtered(text: &str) -> String {
    let mut filter = Filter::default();
    let mut shown = filter.piece(text.as_bytes());
    shown.extend(filter.end());
    String::from_utf8_lossy(&shown).into_owned()
}

/// Formats a duration for people: `1.3 s`, `2 min 5 s`.
#[must_use]
pub fn seconds(duration: Duration) -> String {
    match duration.as_secs() {
        0..60 => format!("{:.1} s", duration.as_secs_f64()),
        whole => format!("{} min {} s", whole / 60, whole % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use indicatif::TermLike;
    use std::io;

    /// Keeps what is written to a terminal of 80 columns.
    #[derive(Debug, Clone, Default)]
    struct Screen(Arc<Mutex<String>>);

    impl TermLike for Screen {
        fn width(&self) -> u16 {
            80
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> io::Result<()> {
            self.write_str(text)
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            lock(&self.0).push_str(text);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_step_is_named_with_and_without_a_total() {
        for (bytes, expected) in [
            (None, "booting ("),
            (Some((1 << 20, 4 << 20)), "[======>                 ] booting 1"),
        ] {
            let screen = Screen::default();
            let target = ProgressDrawTarget::term_like(Box::new(screen.clone()));
            let began = Instant::now().checked_sub(2 * SHOWN_AFTER).expect("a past time");
            let template = style(SPINNER);
            let bar = ProgressBar::with_draw_target(None, target).with_style(template);
            let mut step =
                Step { label: "booting".into(), began, bytes, shown: None, bar: Some(bar) };
            step.draw();
            let shown = lock(&screen.0).clone();
            assert!(shown.contains(expected), "{shown:?}");
        }
    }

    #[test]
    fn labels_are_one_short_line() {
        assert_eq!(one_line("booting"), "booting");
        assert_eq!(one_line("warming up: sh -c set -e\nmkfifo"), "warming up: sh -c set -e ...");
        assert_eq!(one_line(&"x".repeat(200)).chars().count(), 94);
        assert_eq!(one_line("a\u{1b}[2Jb\u{202e}"), r"a\x1b[2Jb\u{202e}");
        assert_eq!(filtered("ok \u{1b}]52;c;x\u{7}\u{9b}2J"), r"ok \x1b]52;c;x\x07\u{9b}2J");
    }

    /// A step that has lasted 2 s, drawn to a hidden target.
    fn drawn(bytes: Option<(u64, u64)>) -> ProgressBar {
        let hidden = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        let mut step = Step {
            label: "reading".into(),
            began: Instant::now().checked_sub(Duration::from_secs(2)).expect("an uptime of 2 s"),
            bytes,
            shown: None,
            bar: Some(hidden.clone()),
        };
        step.draw();
        hidden
    }

    /// The seconds that a bar shows behind `text`.
    fn lasted(bar: &ProgressBar, text: &str) -> f64 {
        let message = bar.message();
        let rest = message.strip_prefix(text).unwrap_or_else(|| panic!("{message}"));
        let seconds = rest.split_once(" s").unwrap_or_else(|| panic!("{message}")).0;
        seconds.parse().unwrap_or_else(|e| panic!("{message}: {e}"))
    }

    #[test]
    fn a_terminal_shows_a_bar_where_the_end_is_known_and_a_spinner_elsewhere() {
        let bar = drawn(Some((512 << 20, 1 << 30)));
        assert_eq!((bar.position(), bar.length()), (512 << 20, Some(1 << 30)));
        assert!(lasted(&bar, "reading 512.0 MiB of 1.0 GiB (") >= 2.0);
        assert_eq!(drawn(Some((9, 5))).position(), 5, "an estimate that was too low");
        for (bytes, text) in [(Some((512 << 20, 0)), "reading 512.0 MiB ("), (None, "reading (")] {
            let bar = drawn(bytes);
            assert_eq!(bar.length(), None);
            assert!(lasted(&bar, text) >= 2.0);
        }
        assert!(ProgressStyle::with_template(BAR).is_ok());
    }

    #[test]
    fn durations_read_well() {
        assert_eq!(seconds(Duration::from_millis(1_340)), "1.3 s");
        assert_eq!(seconds(Duration::from_secs(125)), "2 min 5 s");
    }

    #[test]
    fn a_step_that_ends_soon_was_never_shown_and_one_that_lasts_was() {
        let (steps, begun) = (Steps::new(), Instant::now());
        steps.begin("short");
        let unshown = steps.shared.lock().step.as_ref().is_some_and(|s| s.shown.is_none());
        // On a busy host this thread may stand still meanwhile.
        assert!(unshown || begun.elapsed() >= SHOWN_AFTER);
        let mut long = Step {
            label: "long".into(),
            began: Instant::now().checked_sub(Duration::from_secs(2)).expect("an uptime of 2 s"),
            bytes: Some((5, 10)),
            shown: None,
            bar: None,
        };
        long.print();
        let first = long.shown.expect("shown after more than a second");
        long.print();
        assert_eq!(long.shown, Some(first), "not again at once");
    }
}
