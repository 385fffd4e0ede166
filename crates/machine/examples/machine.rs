//! A small command line for the library: the verbs of `dayfly machine`, plus `exec`, `push` and
//! `leaks`.

use dayfly_machine::{
    ExecSpec, InitOptions, Input, Machine, Note, RawTerminal, Reexec, Root, StartOrder, copy_in,
    leaks, probe, supervisor_main, window_size,
};
use std::error::Error;
use std::fs::File;
use std::io::{IsTerminal, stderr, stdin, stdout};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

const USAGE: &str = "usage: machine HOME VERB
  init KERNEL_TREE [--cpus N] [--memory MIB] [--daemon FILE] [--vmm FILE] [--init FILE]
      [--share NAME=PATH[:rw]]...
  start | stop | status | rm | leaks
  exec [--host] PROGRAM ARG...     run in the machine (--host: with the host's shared folders);
      stdin, stdout, exit code pass through
  shell [--host] [PROGRAM ARG...]  the same on a terminal
  push FILE TARGET                 copy a file into the machine, mode kept
machine probe";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [verb, orders] = &arguments[..]
        && verb == "supervise"
    {
        return supervisor_main(orders);
    }
    match run(&arguments) {
        Ok(code) => code,
        Err(e) => {
            eprintln!("machine: {e}");
            ExitCode::from(125)
        }
    }
}

fn run(arguments: &[String]) -> Result<ExitCode, Box<dyn Error>> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let progress = &mut |text: &str| eprintln!("{text}");
    match &words[..] {
        ["probe"] => println!("{}", probe()),
        [home, "init", tree, rest @ ..] => {
            let machine = Machine::init(Path::new(home), &init_options(tree, rest)?, progress)?;
            println!("{}", machine.folder().display());
        }
        [home, "start"] => {
            let reexec =
                Reexec { program: std::env::current_exe()?, words: vec!["supervise".into()] };
            // The example knows no daemon, so it ends no running machine.
            let order = StartOrder::to_use(&reexec, &|| None);
            let say = &mut |note: Note<'_>| match note {
                Note::Step(text) | Note::Line(text) => eprintln!("{text}"),
            };
            println!("{:?}", Machine::open(Path::new(home))?.start(&order, say)?);
        }
        [home, "stop"] => {
            println!(
                "{:?}",
                Machine::open(Path::new(home))?.stop(Duration::from_secs(20), progress)?
            )
        }
        [home, "status"] => {
            println!(
                "{}",
                serde_json::to_string_pretty(&Machine::open(Path::new(home))?.status()?)?
            );
        }
        [home, "rm"] => Machine::open(Path::new(home))?.rm(progress)?,
        [home, "leaks"] => {
            let found = leaks(Path::new(home));
            found.iter().for_each(|leak| println!("{leak}"));
            return Ok(if found.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        [home, "push", file, target] => {
            let mode = std::fs::metadata(file)?.permissions().mode() & 0o7777;
            copy_in(&Machine::open(Path::new(home))?, &mut File::open(file)?, target, mode)?;
        }
        [home, "exec", rest @ ..] => return exec(&Machine::open(Path::new(home))?, rest, false),
        [home, "shell", rest @ ..] => return exec(&Machine::open(Path::new(home))?, rest, true),
        _ => return Err(USAGE.into()),
    }
    Ok(ExitCode::SUCCESS)
}

fn init_options(tree: &str, mut rest: &[&str]) -> Result<InitOptions, Box<dyn Error>> {
    // cargo puts examples one folder below the other programs.
    let here = std::env::current_exe()?;
    let init = here
        .ancestors()
        .skip(1)
        .take(2)
        .map(|d| d.join("dayfly-machine-init"))
        .find(|p| p.exists());
    let mut options =
        InitOptions::new(PathBuf::from(tree).canonicalize()?, init.unwrap_or_default());
    let path = |text: &str| PathBuf::from(text).canonicalize().map_err(|e| format!("{text}: {e}"));
    while let Some((option, after)) = rest.split_first() {
        rest = after;
        let (value, after) = rest.split_first().ok_or("an option without its value")?;
        rest = after;
        match *option {
            "--cpus" => options.cpus = value.parse()?,
            "--memory" => options.memory_mib = value.parse()?,
            "--daemon" => options.daemon = Some(path(value)?),
            "--vmm" => options.vmm = Some(path(value)?),
            "--init" => options.init_program = path(value)?,
            "--share" => options.shares.push(value.parse()?),
            other => return Err(format!("unknown option {other}\n{USAGE}").into()),
        }
    }
    Ok(options)
}

fn exec(machine: &Machine, mut words: &[&str], terminal: bool) -> Result<ExitCode, Box<dyn Error>> {
    let mut spec = ExecSpec::default();
    if let [first, rest @ ..] = words
        && *first == "--host"
    {
        spec.root = Root::Host;
        words = rest;
    }
    spec.argv = words.iter().map(|w| (*w).to_owned()).collect();
    let input = stdin();
    let exit = if terminal && input.is_terminal() {
        if spec.argv.is_empty() {
            spec.argv.push(if spec.root == Root::Host { "bash" } else { "sh" }.to_owned());
        }
        spec.tty = window_size(&input);
        spec.env.extend(std::env::var("TERM").ok().map(|t| ("TERM".to_owned(), t)));
        let _raw = RawTerminal::new(input.as_fd());
        machine.exec(&spec, Input::Terminal(input.as_fd()), &mut stdout(), &mut stderr())?
    } else {
        if spec.argv.is_empty() {
            spec.argv.push("sh".to_owned());
        }
        machine.exec(&spec, Input::Descriptor(input.as_fd()), &mut stdout(), &mut stderr())?
    };
    Ok(ExitCode::from(u8::try_from(exit.shell_code()).unwrap_or(255)))
}
