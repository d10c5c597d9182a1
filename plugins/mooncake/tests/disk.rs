//! Objects that lie in no memory: in a folder that hosts share, and on the disk of a peer.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use std::process::{Child, Command, Stdio};

use common::services::{Master, Mode, Official, Port, home};
use common::*;
use kvdock_plugin_api::PageStatus;
use kvdock_plugin_mooncake::wire::rpc;
use kvdock_plugin_mooncake::wire::types::{Place, Replica, ReplicaStatus};

const BYTES: u64 = 100_000;

fn replicas(master: &Master, name: &str) -> Vec<Replica> {
    master.call::<rpc::GetReplicaList>(&(name, "default")).map(|found| found.list).unwrap_or_default()
}

fn is_whole(replica: &Replica) -> bool {
    replica.status == ReplicaStatus::COMPLETE
}

/// What our names are, without what they hold.
fn names(master: &Master, bench: &Bench, numbers: &[u64]) -> Vec<String> {
    let set = bench.set(numbers);
    assert!(set.all_ok(), "{set:?}\n{}", bench.logs());
    let all = master.keys();
    let of = |number: &u64| {
        let hex: String = keys(&[*number])[0].iter().map(|byte| format!("{byte:02x}")).collect();
        all.iter().find(|name| name.ends_with(&hex)).unwrap().clone()
    };
    let names = numbers.iter().map(of).collect();
    assert!(bench.remove(numbers).all_ok());
    names
}

#[test]
fn objects_in_a_shared_folder_are_read_when_no_memory_has_them() {
    let folder = tempfile::tempdir().unwrap();
    let master = Master::start(&[&format!("--root_fs_dir={}", folder.path().display()), "--client_ttl=2"]);
    let lender = Bench::new(&master.config(Mode::Peer, 64 << 20), pool(4, BYTES));
    let names = names(&master, &lender, &[1, 2]);
    drop(lender);
    let mut official = Official::start(&master, Mode::Peer, 64 << 20);
    let bench = Bench::new(&master.config(Mode::Peer, 0), pool(4, BYTES));
    for (name, number) in names.iter().zip([1, 2]) {
        assert_eq!(official.put(name, &bench.pool.pattern(number)), 0);
    }
    let on_disk = |replica: &Replica| matches!(replica.place, Place::Disk(_)) && is_whole(replica);
    wait_for("copies in the folder", || names.iter().all(|name| replicas(&master, name).iter().any(on_disk)));
    official.kill();
    wait_for("the end of the copies in memory", || {
        names
            .iter()
            .all(|name| replicas(&master, name).iter().all(|replica| !matches!(replica.place, Place::Memory(_))))
    });
    assert_eq!(bench.prefix(&[1, 2, 3]), 2);
    assert!(bench.has_all(&[1, 2]), "{}", bench.logs());
    // A file that is cut short is no page, and one that is gone neither.
    let path = match &replicas(&master, &names[0])[0].place {
        Place::Disk(file) => file.path.clone(),
        other => panic!("{other:?}"),
    };
    std::fs::write(&path, [7; 100]).unwrap();
    assert_eq!(bench.get(&[1, 2]).statuses, [[PageStatus::Corrupt, PageStatus::Ok]], "{}", bench.logs());
    std::fs::remove_file(&path).unwrap();
    assert_eq!(bench.get(&[1, 2]).statuses, [[PageStatus::Missing, PageStatus::Ok]], "{}", bench.logs());
}

#[test]
fn the_masters_shared_folder_keeps_no_put_of_ours_from_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let master = Master::start(&[&format!("--root_fs_dir={}", folder.path().display())]);
    let bench = Bench::new(&master.config(Mode::Peer, 64 << 20), pool(4, BYTES));
    assert!(bench.set(&[1, 2]).all_ok(), "{}", bench.logs());
    assert!(bench.has_all(&[1, 2]));
    for name in master.keys() {
        assert!(replicas(&master, &name).iter().all(|replica| matches!(replica.place, Place::Memory(_))), "{name}");
    }
    assert!(bench.remove(&[1, 2]).all_ok(), "an unfinished copy on disk would keep it");
    assert!(master.keys().is_empty());
}

/// A process, and the port that it listens at.
struct Peer {
    child: Child,
    _port: Port,
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A storage peer that keeps copies on its own disk.
fn peer_with_disk(master: &Master, folder: &std::path::Path) -> Peer {
    let port = Port::take();
    let child = Command::new(home().join("mooncake/mooncake_client"))
        .args(["--host=127.0.0.1", "--metadata_server=P2PHANDSHAKE", "--protocol=tcp", "--global_segment_size=16 MB"])
        .args(["--enable_offload=true", "--local_buffer_size=64 MB"])
        .arg(format!("--master_server_address={}", master.address()))
        .arg(format!("--port={}", port.number))
        .env("MC_TCP_BIND_ADDRESS", "127.0.0.1")
        .env("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", folder)
        .env("MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR", "file_per_key_storage_backend")
        .env("MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    Peer { child: child.unwrap(), _port: port }
}

#[test]
fn objects_on_an_owners_disk_are_read_by_asking_it() {
    let folder = tempfile::tempdir().unwrap();
    let master = Master::start(&["--enable_offload=true", "--default_kv_lease_ttl=1000"]);
    let _peer = peer_with_disk(&master, folder.path());
    wait_for("the peer's segment", || has_segment(&master));
    let bench = Bench::new(&master.config(Mode::Peer, 0), pool(4, 1 << 20));
    let on_disk = |replica: &Replica| matches!(replica.place, Place::LocalDisk(_)) && is_whole(replica);
    let mut names: Vec<String> = Vec::new();
    // What it took before its disk was ready never goes there.
    wait_for("copies on the peer's disk", || {
        bench.remove(&[1, 2]);
        assert!(bench.set(&[1, 2]).all_ok(), "{}", bench.logs());
        names = master.keys();
        std::thread::sleep(std::time::Duration::from_millis(2500));
        names.len() == 2 && names.iter().all(|name| replicas(&master, name).iter().any(on_disk))
    });
    // Others fill its memory until ours have gone from there. Asking for them would lease them, so it is asked once in a while.
    let in_memory =
        |name: &String| replicas(&master, name).iter().any(|replica| matches!(replica.place, Place::Memory(_)));
    let mut next = 100;
    let mut looked = 0;
    while names.iter().any(in_memory) {
        looked += 1;
        assert!(looked < 30, "the copies in memory do not go");
        std::thread::sleep(std::time::Duration::from_millis(1500));
        for _ in 0..6 {
            bench.set(&[next, next + 1, next + 2, next + 3]);
            next += 4;
        }
    }
    assert_eq!(bench.prefix(&[1, 2]), 2);
    assert!(bench.has_all(&[1, 2]), "{}", bench.logs());
}

fn has_segment(master: &Master) -> bool {
    let probe = Bench::new(&master.config(Mode::Peer, 0), pool(1, 64));
    let stored = probe.set(&[u64::MAX]).all_ok();
    if stored {
        probe.remove(&[u64::MAX]);
    }
    stored
}
