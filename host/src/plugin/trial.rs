//! Maps a new library in a process of its own first.
//!
//! Mapping a library runs its constructors, under a lock of the dynamic loader that other threads need as soon as they end, begin, or use
//! a thread-local for the first time. A constructor that does not return would stop the whole server, and one that crashes would
//! end it. So the server lets a child do it before, with a limit of time.

use std::ffi::OsString;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use rustix::process::{Pid, Signal, kill_process_group, set_parent_process_death_signal};

use super::refusal::Reason;

/// Time that the constructors of a library may take.
const LIMIT: Duration = Duration::from_secs(10);
/// How the child says that the dynamic loader refused the file. The server finds out why by itself.
const REFUSED: i32 = 3;

/// The program of the child, and its arguments before the file.
static PROGRAM: OnceLock<(PathBuf, Vec<OsString>)> = OnceLock::new();

/// From now on each new library is mapped by `program`, called with `arguments` and the file, before this process does. It has to
/// call [`map_and_end`]. A second call changes nothing.
pub fn set_program(program: PathBuf, arguments: Vec<OsString>) {
    let _ = PROGRAM.set((program, arguments));
}

/// What the child does.
pub fn map_and_end(file: &Path) -> ! {
    // A server that is ended takes its child along.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    // SAFETY: this process is there to find out whether the library's constructors return.
    let mapped = unsafe { Library::open(Some(file), RTLD_NOW | RTLD_LOCAL) };
    // SAFETY: ends the process at once; nothing of the library is to run any more, its destructors included.
    unsafe { libc::_exit(if mapped.is_ok() { 0 } else { REFUSED }) }
}

/// Lets a child map `file`.
///
/// # Errors
/// When its constructors do not return in time, or end the process.
pub(super) fn map_elsewhere(file: &Path) -> Result<(), Reason> {
    let Some((program, arguments)) = PROGRAM.get() else { return Ok(()) };
    let mut command = Command::new(program);
    command.args(arguments).arg(file).process_group(0);
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut child =
        child.map_err(|error| Reason::Constructors(format!("no process for that could be started: {error}")))?;
    let ended = wait(&mut child, Instant::now() + LIMIT);
    // Also what the constructors have started goes.
    if let Some(group) = Pid::from_raw(child.id().cast_signed()) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    let how = match ended {
        Ok(Some(status)) if status.success() || status.code() == Some(REFUSED) => return Ok(()),
        Ok(Some(status)) => format!("its constructors ended the process ({})", how(status)),
        Ok(None) => {
            // It was killed above, so this does not wait.
            let _ = child.wait();
            format!("its constructors did not return within {} s", LIMIT.as_secs())
        }
        Err(error) => format!("that process can't be waited for: {error}"),
    };
    Err(Reason::Constructors(how))
}

/// How the child ended; none when it runs on at the deadline.
fn wait(child: &mut Child, deadline: Instant) -> std::io::Result<Option<ExitStatus>> {
    let mut pause = Duration::from_millis(1);
    loop {
        let ended = child.try_wait()?;
        if ended.is_some() || Instant::now() >= deadline {
            return Ok(ended);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

fn how(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}
