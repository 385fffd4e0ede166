//! The `dayfly` program; everything is in the library beside it.

fn main() -> std::process::ExitCode {
    dayfly_cli::main()
}
