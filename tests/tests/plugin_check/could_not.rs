//! What can't be run, what is interrupted, and what never comes back from being loaded.

use std::io::Read as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use kvdock_tests::paths;
use kvdock_tests::port::Port;
use rustix::process::{Pid, Signal, kill_process};

use super::{c_plugin, check, line, text};

/// Far longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(100);
const HANGS: &str = "-DCONSTRUCTOR=for (;;) pause()";

fn entries(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

fn ended(child: &mut Child) -> ExitStatus {
    let began = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if began.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("it did not end");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn rules_that_could_not_be_run_were_skipped_and_the_check_a_success() {
    let folder = tempfile::tempdir().unwrap();
    let junit = folder.path().join("report.xml");
    let output = Command::new(paths::kvdock())
        .args(["plugin", "check", "--junit"])
        .args([&junit, &paths::file_plugin()])
        .env("TMPDIR", "/nonexistent")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", text(&output));
    for rule in ["load.maps", "data.one_page", "life.close"] {
        let line = line(&output, rule);
        assert!(line.starts_with("error ") && line.contains("could not be run"), "{line}");
    }
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(errors.lines().count(), 1, "{errors}");
    assert!(errors.contains("load.maps") && errors.contains("/nonexistent"), "{errors}");
    let xml = std::fs::read_to_string(&junit).unwrap();
    assert!(xml.contains("<error ") && !xml.contains(r#"errors="0""#) && xml.contains(r#"failures="0""#), "{xml}");
}

#[test]
fn an_interrupted_check_left_its_folders_behind() {
    let (_folder, library) = c_plugin(&[HANGS]);
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let temporary = tempfile::tempdir().unwrap();
        // Whatever this test was started with, such as nohup.
        let mut child = Command::new("env")
            .arg("--default-signal=HUP")
            .arg(paths::kvdock())
            .args(["plugin", "check", "--patience", "100"])
            .arg(&library)
            .env("TMPDIR", temporary.path())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let began = Instant::now();
        while entries(temporary.path()) == 0 {
            assert!(began.elapsed() < PATIENCE && child.try_wait().unwrap().is_none(), "no rule has begun");
            std::thread::sleep(Duration::from_millis(10));
        }
        kill_process(Pid::from_child(&child), signal).unwrap();
        let status = ended(&mut child);
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!((status.code(), status.signal()), (Some(2), None), "{signal:?}: {said}");
        assert!(said.contains("error: interrupted"), "{signal:?}: {said}");
        assert_eq!(entries(temporary.path()), 0, "{signal:?}");
    }
}

/// A store that can't be reached says nothing of the plugin: each rule was reported as broken.
#[test]
fn a_store_that_could_not_be_reached_was_a_plugin_that_breaks_every_rule() {
    let plugin = paths::mooncake_plugin();
    let nobody = Port::take();
    let port = nobody.number;
    let config = format!(r#"{{"master_server_address":"127.0.0.1:{port}","global_segment_size":0}}"#);
    let output = check(&plugin, &["--config", &config]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    for part in ["can't be checked", &format!("127.0.0.1:{port}"), "extra_backend_tag", "{scratch}"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(output.stdout.is_empty(), "no rule has run: {}", text(&output));
    // Nor does a configuration that the schema takes and the plugin refuses.
    let output =
        check(&plugin, &["--config", r#"{"master_server_address":"127.0.0.1:1","protocol":"rdma","device_name":"{"}"#]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("can't be checked") && said.contains("device_name"), "{said}");
}

#[test]
fn a_report_that_could_not_be_written_was_noticed_after_all_rules() {
    let output = check(&paths::file_plugin(), &["--junit", "/nowhere/report.xml"]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output));
    assert!(text(&output).starts_with("error: --junit: /nowhere/report.xml: "), "{}", text(&output));
    assert!(output.stdout.is_empty(), "no rule has run: {}", text(&output));
}

#[test]
fn a_constructor_that_hangs_was_a_call_that_hangs() {
    let (_folder, library) = c_plugin(&[HANGS]);
    let output = check(&library, &[]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    let maps = line(&output, "load.maps");
    assert!(maps.starts_with("FAILED") && maps.contains("they have not returned after 10 s"), "{maps}");
    assert!(text(&output).contains("1 rules kept, 1 broken"), "{}", text(&output));
    for rule in ["calls.hang", "data.one_page"] {
        assert!(line(&output, rule).contains("not run: load.maps is not kept"), "{}", text(&output));
    }
}

#[test]
fn a_benched_plugin_left_a_process_and_the_copy_of_its_library() {
    let (_folder, library) = c_plugin(&["-DCONSTRUCTOR=if (fork() == 0) for (;;) pause(); abort()"]);
    let temporary = tempfile::tempdir().unwrap();
    let mut child = Command::new(paths::kvdock())
        .args(["plugin", "bench", "--quick"])
        .arg(&library)
        .env("TMPDIR", temporary.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let status = ended(&mut child);
    // The process that the plugin has forked holds standard error open for as long as it lives.
    let (done, read) = channel();
    let mut pipe = child.stderr.take().unwrap();
    std::thread::spawn(move || {
        let mut said = String::new();
        let _ = pipe.read_to_string(&mut said);
        let _ = done.send(said);
    });
    let said = read.recv_timeout(PATIENCE).expect("the forked process lives on");
    assert_eq!(status.code(), Some(2), "{said}");
    assert!(said.contains("SIGABRT"), "{said}");
    assert_eq!(entries(temporary.path()), 0);
}
