//! The `dayfly` program; its code is in the library `dayfly_cli`.

fn main() -> std::process::ExitCode {
    dayfly_cli::main()
}
