//! Ports for the services of tests.

use std::fs::File;

/// A port that is this process's alone among those of tests. It is none that the kernel gives out by itself: so nobody else gets it before who is to
/// listen there does, or while that one is started anew, and a client that keeps asking while nobody listens does not meet itself there.
#[derive(Debug)]
pub struct Port {
    /// Its number.
    pub number: u16,
    _lock: File,
}

impl Port {
    /// Takes one.
    pub fn take() -> Port {
        let start = std::process::id().wrapping_mul(97);
        for step in 0..12_000u32 {
            let number = 20_000 + (start.wrapping_add(step) % 12_000) as u16;
            let path = std::env::temp_dir().join(format!("kvdock-test-port-{number}"));
            let Ok(lock) = File::options().create(true).append(true).open(path) else { continue };
            let locked = rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive);
            if locked.is_ok() && std::net::TcpListener::bind(("127.0.0.1", number)).is_ok() {
                return Port { number, _lock: lock };
            }
        }
        panic!("there is no free port");
    }
}
