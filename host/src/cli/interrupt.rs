//! Signals that ask a command to end, for commands that leave processes and folders behind when they just die.

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

use super::Failure;

/// Listens until it is dropped.
pub(super) struct Interrupts(Handle);

impl Interrupts {
    /// Calls `told` on a thread of its own at each signal.
    pub(super) fn listen(mut told: impl FnMut() + Send + 'static) -> Result<Interrupts, Failure> {
        let cannot = |error: std::io::Error| Failure(format!("can't listen for signals: {error}"));
        // A command under nohup stays deaf to the end of its terminal.
        let hangup = (!ignores(SIGHUP)).then_some(SIGHUP);
        let mut signals = Signals::new([SIGINT, SIGTERM].into_iter().chain(hangup)).map_err(cannot)?;
        let handle = signals.handle();
        std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || signals.forever().for_each(|_| told()))
            .map_err(cannot)?;
        Ok(Interrupts(handle))
    }
}

impl Drop for Interrupts {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Whether this process was started with the signal ignored.
fn ignores(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}
