//! How an image's configuration completes a request for a program, by docker's rules.
//!
//! | | user, folder, variables | arguments |
//! |---|---|---|
//! | `run` | the request's, or else the image's | entrypoint, then the request's or image's cmd |
//! | `exec` | the request's, or else the image's | the request's |
//!
//! An entrypoint in the request replaces the image's, and its cmd is then ignored.

use crate::base::error::{ApiError, Outcome};
use dayfly_api::agent::ExecSpec;
use dayfly_units::ImageConfig;

/// The user, folder and variables of a program in a VM that exists.
pub fn for_exec(spec: &mut ExecSpec, config: &ImageConfig) {
    if spec.user.is_empty() {
        spec.user.clone_from(&config.user);
    }
    if spec.cwd.is_empty() && !config.workdir.is_empty() {
        spec.cwd.clone_from(&config.workdir);
        spec.make_cwd = true;
    }
    for variable in &config.env {
        // Images may list names without a value, which docker ignores in a container.
        let Some((name, value)) = variable.split_once('=') else { continue };
        if !name.is_empty() && !spec.env.contains_key(name) {
            spec.env.insert(name.to_owned(), value.to_owned());
        }
    }
}

/// As [`for_exec`], and the arguments of a VM's first program. `entrypoint` is the request's.
///
/// # Errors
/// Neither the request nor the image names a program.
pub fn for_run(
    spec: &mut ExecSpec,
    entrypoint: Option<&[String]>,
    config: &ImageConfig,
) -> Outcome<()> {
    for_exec(spec, config);
    let given = std::mem::take(&mut spec.argv);
    let (first, rest) = match entrypoint {
        Some(entrypoint) => (entrypoint, given),
        None if given.is_empty() => (&config.entrypoint[..], config.cmd.clone()),
        None => (&config.entrypoint[..], given),
    };
    spec.argv = first.iter().cloned().chain(rest).collect();
    if spec.argv.is_empty() {
        return Err(ApiError::invalid(
            "exec: argv: expected a program, got none, and the image has neither entrypoint nor \
             cmd; name a program",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn config(entrypoint: &str, cmd: &str) -> ImageConfig {
        ImageConfig {
            entrypoint: words(entrypoint),
            cmd: words(cmd),
            env: words("A=1 B=x=y ODD =empty A=2"),
            workdir: "/srv/new".into(),
            user: "app".into(),
            exposed: words("80/tcp"),
        }
    }

    fn run(argv: &str, given: Option<&str>, entrypoint: &str, cmd: &str) -> Outcome<String> {
        let mut spec = ExecSpec { argv: words(argv), ..ExecSpec::default() };
        let given = given.map(words);
        for_run(&mut spec, given.as_deref(), &config(entrypoint, cmd))?;
        Ok(spec.argv.join(" "))
    }

    #[test]
    fn the_request_wins_over_the_image() {
        let mut spec = ExecSpec { argv: words("id"), ..ExecSpec::default() };
        for_exec(&mut spec, &config("/entry", "cmd"));
        let env = [("A", "1"), ("B", "x=y")].map(|(name, value)| (name.into(), value.into()));
        let expected = ExecSpec {
            argv: words("id"),
            user: "app".into(),
            cwd: "/srv/new".into(),
            make_cwd: true,
            env: BTreeMap::from(env),
            ..ExecSpec::default()
        };
        assert_eq!(spec, expected);
        let asked = ExecSpec {
            argv: words("id"),
            user: "root".into(),
            cwd: "/".into(),
            env: BTreeMap::from([("A".into(), "3".into()), ("B".into(), String::new())]),
            ..ExecSpec::default()
        };
        let mut spec = asked.clone();
        for_exec(&mut spec, &config("", ""));
        assert_eq!(spec, asked);
    }

    #[test]
    fn a_first_programs_arguments_are_dockers() {
        assert_eq!(run("", None, "/entry -x", "a b").unwrap(), "/entry -x a b");
        assert_eq!(run("c", None, "/entry -x", "a b").unwrap(), "/entry -x c");
        assert_eq!(run("", None, "", "sh").unwrap(), "sh");
        assert_eq!(run("id -u", None, "", "sh").unwrap(), "id -u");
        assert_eq!(run("", Some("/other"), "/entry", "a").unwrap(), "/other");
        assert_eq!(run("c", Some("/other"), "/entry", "a").unwrap(), "/other c");
        assert_eq!(run("c", Some(""), "/entry", "a").unwrap(), "c");
        assert!(run("", None, "", "").unwrap_err().0.message.contains("name a program"));
        assert!(run("", Some(""), "/entry", "a").is_err());
    }
}
