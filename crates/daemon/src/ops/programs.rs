//! Detached programs of a guest: listed, signalled, waited for, forgotten. The guest's agent has
//! them; the daemon keeps nothing of them.

use crate::base::error::{ApiError, Outcome};
use crate::daemon::Daemon;
use crate::ops::exec::{PROGRAM, explain};
use crate::vm::Vm;
use crate::vmm::agent_link::{AgentLink, LinkError, parse_reply, read_frame};
use dayfly_api::agent::{Program, Reply, Request, find_program, protocol_of};
use dayfly_api::types::ErrorCode;
use dayfly_units::text::{SHORT, escaped};

/// The version of the agent's protocol that has ids of programs.
pub const IDS: u32 = 1;

/// Checks that the VM's agent speaks this version of the protocol, or a later one.
///
/// # Errors
/// [`ErrorCode::State`]: the agent is that of an earlier version, in a snapshot.
pub fn needs(vm: &Vm, protocol: u32, what: &str) -> Outcome<()> {
    let version = vm.live().agent_version;
    let got = protocol_of(&version);
    if got >= protocol {
        return Ok(());
    }
    Err(ApiError::new(
        ErrorCode::State,
        format_args!(
            "VM {}: {what}: expected an agent with protocol {protocol}, got {got} (version {}); \
             bake its snapshot anew",
            vm.name,
            escaped(&version, SHORT)
        ),
    ))
}

async fn ask(daemon: &Daemon, vm: &Vm, request: &Request, doing: &'static str) -> Outcome<Reply> {
    vm.serves("ask for the programs of")?;
    needs(vm, IDS, doing)?;
    let link = AgentLink::connect(&vm.dir.vsock(), daemon.config.deadlines.agent).await?;
    Ok(link.ask(request, doing).await?)
}

fn unexpected(doing: &'static str, expected: &'static str, reply: &Reply) -> ApiError {
    let got = format!("{reply:?}").chars().take(SHORT).collect();
    LinkError::Unexpected { doing, expected, got }.into()
}

/// The detached programs of a VM, the oldest first.
///
/// # Errors
/// The VM does not run, or its agent refuses or is too old.
pub async fn list(daemon: &Daemon, vm: &Vm) -> Outcome<Vec<Program>> {
    let doing = "listing programs";
    match ask(daemon, vm, &Request::Programs, doing).await? {
        Reply::Programs { programs } => Ok(programs),
        reply => Err(unexpected(doing, "Programs", &reply)),
    }
}

/// One of them.
///
/// # Errors
/// As [`list`], or there is none of this name.
pub async fn one(daemon: &Daemon, vm: &Vm, word: &str) -> Outcome<Program> {
    let mut programs = list(daemon, vm).await?;
    let found = find_program(programs.iter().map(|p| (p.id.as_str(), p.pid)), word);
    let found = found.filter(|at| *at < programs.len()).map(|at| programs.swap_remove(at));
    found.ok_or_else(|| {
        let (name, word) = (&vm.name, escaped(word, SHORT));
        ApiError::not_found(format_args!(
            "VM {name}, program {word}: no such id, unique start of an id, or process id; \
             `dayfly program ls {name}` lists them"
        ))
    })
}

async fn done(daemon: &Daemon, vm: &Vm, request: Request, doing: &'static str) -> Outcome<()> {
    match ask(daemon, vm, &request, doing).await? {
        Reply::Ok => Ok(()),
        reply => Err(unexpected(doing, "Ok", &reply)),
    }
}

/// Sends a signal to the process group of a program.
///
/// # Errors
/// As [`one`]; the program has ended; the signal does not exist.
pub async fn kill(daemon: &Daemon, vm: &Vm, word: &str, signal: i32) -> Outcome<()> {
    let program = word.to_owned();
    done(daemon, vm, Request::SignalProgram { program, signal }, "signalling a program").await
}

/// Forgets a program that has ended, and its output.
///
/// # Errors
/// As [`one`]; the program still runs.
pub async fn forget(daemon: &Daemon, vm: &Vm, word: &str) -> Outcome<()> {
    let program = word.to_owned();
    done(daemon, vm, Request::ForgetProgram { program }, "forgetting a program").await
}

/// Waits until a program has ended.
///
/// # Errors
/// As [`one`]; or the VM ended before.
pub async fn wait(daemon: &Daemon, vm: &Vm, word: &str) -> Outcome<Program> {
    let doing = "waiting for a program";
    vm.serves("wait for a program in")?;
    needs(vm, IDS, doing)?;
    let mut link = AgentLink::connect(&vm.dir.vsock(), daemon.config.deadlines.agent).await?;
    link.send(&Request::WaitForProgram { program: word.to_owned() }, doing).await?;
    // Without the link's time limit: a program runs as long as it likes.
    let mut stream = link.into_stream();
    let frame = tokio::select! {
        biased;
        frame = read_frame(&mut stream, doing) => frame,
        () = vm.wait_gone() => return Err(explain(vm, PROGRAM).await),
    };
    match frame {
        Ok(None) | Err(LinkError::Io { .. }) => Err(explain(vm, PROGRAM).await),
        frame => match parse_reply(frame?, doing)? {
            Reply::Program(program) => Ok(program),
            reply => Err(unexpected(doing, "Program", &reply)),
        },
    }
}

#[cfg(test)]
#[path = "programs_tests.rs"]
mod tests;
