//! Programs in a clone: streams, codes, users, terminals, time limits and copies of files.

use crate::harness::{BASE, dayfly, fed, ok, until, world};

#[test]
fn streams_codes_and_signals_come_back() {
    let world = world();
    let vm = ok(&["create", "--name", "streams", BASE]);
    let run = |words: &[&str]| {
        let mut all = vec!["exec", &vm];
        all.extend(words);
        dayfly(&all)
    };
    let got = run(&["/bin/sh", "-c", "echo out; echo err >&2; exit 7"]);
    assert_eq!((got.code, got.out.as_str(), got.err.as_str()), (7, "out\n", "err\n"));
    assert_eq!(run(&["/bin/sh", "-c", "kill -TERM $$"]).code, 128 + 15);
    assert_eq!(run(&["/no/such/program"]).code, 127);
    assert_eq!(run(&["no-such-program"]).code, 127);
    assert_eq!(run(&["/etc/passwd"]).code, 126);
    let long = "x".repeat(118_000);
    let words = ["/bin/sh", "-c", "echo $# ${#1}", "sh"].into_iter();
    let words: Vec<&str> = words.chain(std::iter::repeat_n(long.as_str(), 15)).collect();
    let got = run(&words);
    assert_eq!((got.code, got.out.as_str()), (0, "15 118000\n"), "{}", got.err);
    assert_eq!(run(&["/bin/sh", "-c", "readlink /proc/self/fd/0"]).out, "/dev/null\n");
    world.clean();
}

#[test]
fn input_of_eight_mib_comes_back_whole() {
    let world = world();
    let input: Vec<u8> =
        (0..8u32 << 20).map(|i| u8::try_from((i ^ (i >> 11)) % 26).unwrap() + b'a').collect();
    let got = fed(&["run", "-i", BASE, "cat"], &input);
    assert_eq!(got.code, 0, "{}", got.err);
    assert!(got.out.as_bytes() == input, "{} bytes came back of {}", got.out.len(), input.len());
    world.clean();
}

#[test]
fn user_folder_variables_terminal_and_time_are_as_asked() {
    let world = world();
    ok(&["create", "--name", "asked", BASE]);
    assert_eq!(ok(&["exec", "-u", "nobody", "asked", "id", "-un"]), "nobody");
    assert_eq!(ok(&["exec", "-u", "1234:5678", "asked", "id", "-u"]), "1234");
    assert_eq!(ok(&["exec", "-w", "/usr/share", "asked", "pwd"]), "/usr/share");
    assert_eq!(ok(&["exec", "-e", "GREETING=a b", "asked", "printenv", "GREETING"]), "a b");
    let got = dayfly(&["exec", "-t", "asked", "tty"]);
    assert_eq!((got.code, got.out.trim_end()), (0, "/dev/pts/0"), "{}", got.err);
    // A time limit also ends the program's children.
    let got = dayfly(&["exec", "--timeout", "1s", "asked", "/bin/sh", "-c", "sleep 977 & wait"]);
    assert!(got.code != 0, "{got:?}");
    let sleepers = |seconds: u32| {
        let list = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$f 2>/dev/null; echo; done";
        let all = ok(&["exec", "asked", "--", "/bin/sh", "-c", list]);
        all.lines().filter(|line| line.trim() == format!("sleep {seconds}")).count()
    };
    until("the end of the program's child", || sleepers(977) == 0);
    ok(&["exec", "asked", "--", "/bin/sh", "-c", "setsid sleep 976 >/dev/null 2>&1 </dev/null &"]);
    until("a running sleep is counted", || sleepers(976) == 1);
    world.clean();
}

#[test]
fn files_and_folders_are_copied_both_ways() {
    let world = world();
    let here = tempfile::tempdir().unwrap();
    let file = here.path().join("data");
    let bytes: Vec<u8> = (0..300_000u32).map(|i| u8::try_from(i * 7 % 251).unwrap()).collect();
    std::fs::write(&file, &bytes).unwrap();
    std::fs::create_dir_all(here.path().join("tree/inner")).unwrap();
    std::fs::write(here.path().join("tree/inner/leaf"), "leaf").unwrap();
    ok(&["create", "--name", "files", BASE]);
    ok(&["cp", file.to_str().unwrap(), "files:/root/data"]);
    ok(&["cp", here.path().join("tree").to_str().unwrap(), "files:/root/"]);
    assert_eq!(ok(&["exec", "files", "cat", "/root/tree/inner/leaf"]), "leaf");
    let back = here.path().join("back");
    ok(&["cp", "files:/root/data", back.to_str().unwrap()]);
    assert!(std::fs::read(&back).unwrap() == bytes);
    ok(&["cp", "files:/root/tree", here.path().join("tree2").to_str().unwrap()]);
    assert_eq!(std::fs::read_to_string(here.path().join("tree2/inner/leaf")).unwrap(), "leaf");
    world.clean();
}
