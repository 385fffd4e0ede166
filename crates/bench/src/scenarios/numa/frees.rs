//! Pages as the kernel frees them: its trace event `kmem:mm_page_free`, in a trace of our own.

use crate::prelude::*;

/// Of each CPU: an event takes about thirty bytes.
const BUFFER_KIB: u32 = 16 << 10;
const PLACE: &str = "/sys/kernel/tracing";
const EVENT: &str = "events/kmem/mm_page_free/enable";

/// A block of pages that was freed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Free {
    /// By this CPU,
    pub cpu: u32,
    /// by this thread's name.
    pub task: String,
    /// The first page's number.
    pub page: u64,
    /// How many.
    pub pages: u64,
}

/// A trace. Dropped, it is gone.
#[derive(Debug)]
pub struct Trace(PathBuf);

impl Trace {
    /// One that does not run.
    pub fn new() -> Result<Self> {
        let folder = format!("{PLACE}/instances/dayfly-bench-{}", std::process::id());
        std::fs::create_dir(&folder).with_context(|| {
            format!("making the trace {folder}; to have traces: mount -t tracefs tracefs {PLACE}")
        })?;
        let trace = Self(folder.into());
        trace.set("buffer_size_kb", &BUFFER_KIB.to_string())?;
        // One for all CPUs, so that their events come in order.
        trace.set("trace_clock", "global")?;
        Ok(trace)
    }

    fn set(&self, name: &str, value: &str) -> Result<()> {
        let path = self.0.join(name);
        std::fs::write(&path, value).with_context(|| format!("{}: {value:?}", path.display()))
    }

    /// From now on, forgetting what was before.
    pub fn begin(&self) -> Result<()> {
        self.set("trace", "\n")?;
        self.set(EVENT, "1")
    }

    /// What was freed since [`Self::begin`], in its order.
    ///
    /// # Errors
    /// The trace cannot be read, or is not whole.
    pub fn end(&self) -> Result<Vec<Free>> {
        self.set(EVENT, "0")?;
        let text = std::fs::read(self.0.join("trace")).context("the trace")?;
        parse(&String::from_utf8_lossy(&text))
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let _ = self.set(EVENT, "0");
        if let Err(e) = std::fs::remove_dir(&self.0) {
            eprintln!("left over: {}: {e}", self.0.display());
        }
    }
}

fn parse(trace: &str) -> Result<Vec<Free>> {
    const HEAD: &str = "# entries-in-buffer/entries-written:";
    let head = trace.lines().find_map(|line| line.strip_prefix(HEAD));
    let counts = head.and_then(|line| line.split_whitespace().next()?.split_once('/'));
    let (kept, written) = counts.with_context(|| format!("the trace: no line {HEAD:?}"))?;
    ensure!(kept == written, "the trace is not whole: {kept} of {written} events");
    let events = trace.lines().filter(|line| line.contains(": mm_page_free: "));
    let frees = events.map(|line| free(line).with_context(|| format!("the trace: {line:?}")));
    let frees: Vec<Free> = frees.collect::<Result<_>>()?;
    let got = frees.len();
    ensure!(got.to_string() == kept, "the trace: {got} of {kept} events were understood");
    Ok(frees)
}

/// `NAME-PID [CPU] FLAGS TIME: mm_page_free: page=0x… pfn=0x… order=…`; a name may hold anything.
fn free(line: &str) -> Option<Free> {
    let (head, tail) = line.rsplit_once(": mm_page_free: ")?;
    let (task, cpu) = head.rsplit_once(']')?.0.rsplit_once('[')?;
    let (task, _) = task.trim().rsplit_once('-')?;
    let value = |name: &str| tail.split_whitespace().find_map(|field| field.strip_prefix(name));
    let page = u64::from_str_radix(value("pfn=0x")?, 16).ok()?;
    let pages = 1_u64.checked_shl(value("order=")?.parse().ok()?)?;
    Some(Free { cpu: cpu.parse().ok()?, task: task.to_owned(), page, pages })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "\
# tracer: nop
#
# entries-in-buffer/entries-written: 2/2   #P:4
#
#           TASK-PID     CPU#  |||||  TIMESTAMP  FUNCTION
#              | |         |   |||||     |         |
         reaper1-212    [003] d..1.   61.260000: mm_page_free: page=00000000a1 pfn=0x17ffff order=0
       a-b [7] c-9       [000] .....    61.260001: mm_page_free: page=00000000a2 pfn=0x200 order=9
";

    #[test]
    fn events_are_read_whatever_the_thread_is_called() {
        let free = |cpu, task: &str, page, pages| Free { cpu, task: task.to_owned(), page, pages };
        let expected = [free(3, "reaper1", 0x17_ffff, 1), free(0, "a-b [7] c", 0x200, 512)];
        assert_eq!(parse(TRACE).unwrap(), expected);
    }

    #[test]
    fn a_trace_that_lost_something_or_says_something_else_is_refused() {
        for (what, instead) in
            [("2/2", "2/3"), ("2/2", "3/3"), ("order=9", "order=99"), ("# entries", "#")]
        {
            assert!(parse(&TRACE.replace(what, instead)).is_err(), "{instead}");
        }
    }
}
