//! Our segment as hostile, slow and old peers see it.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdock_plugin_mooncake::data::{Header, Job, Operation, Outcome, Peers, STATUS_OK, STATUS_REJECTED, transfer};
use kvdock_plugin_mooncake::limit::Limit;
use kvdock_plugin_mooncake::metadata::handshake::{self, Kind};
use kvdock_plugin_mooncake::metadata::{Descriptor, Metadata, Range};
use kvdock_plugin_mooncake::serve::{Bounds, Memory, Server};

const LEN: u64 = 1 << 20;

struct Segment {
    memory: Arc<Memory>,
    server: Server,
}

impl Segment {
    fn new(version: u32) -> Segment {
        Segment::within(version, Bounds::of_this_process())
    }

    fn within(version: u32, bounds: Bounds) -> Segment {
        let memory = Arc::new(Memory::new(LEN).unwrap());
        let server = Server::start_with(memory.clone(), "127.0.0.1", 0, 2, None, bounds).unwrap();
        let name = format!("127.0.0.1:{}", server.handshake_port());
        let range = Range { addr: memory.base(), length: LEN, name: name.clone(), ..Range::default() };
        let mut descriptor = Descriptor::tcp(&name, "127.0.0.1", server.data_port(), vec![range]);
        descriptor.tcp_proto_version = version;
        server.describe(descriptor);
        Segment { memory, server }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.server.data_port())).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    fn endpoint(&self) -> String {
        format!("127.0.0.1:{}", self.server.handshake_port())
    }
}

fn header(operation: Operation, address: u64, size: u64, with_status: bool) -> Vec<u8> {
    Header { size, address, operation, with_status }.to_bytes().to_vec()
}

fn read(stream: &mut TcpStream, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

/// Moves one object whole, cut into pieces of a size.
fn move_all(
    peers: &Peers,
    operation: Operation,
    endpoint: &str,
    address: u64,
    bytes: &mut [u8],
    piece: usize,
) -> Outcome {
    let pieces: Vec<libc::iovec> = bytes
        .chunks_mut(piece)
        .map(|chunk| libc::iovec { iov_base: chunk.as_mut_ptr().cast(), iov_len: chunk.len() })
        .collect();
    let job = Job { peer: peers.get(endpoint), address, len: bytes.len() as u64, pieces: &pieces };
    // SAFETY: the pieces are parts of `bytes`, which is borrowed for the call.
    unsafe { transfer(peers, operation, &[job], &Limit::within(Duration::from_secs(20))) }.remove(0)
}

#[test]
fn both_versions_of_the_protocol_move_bytes_in_pieces() {
    for version in [1, 2] {
        let segment = Segment::new(version);
        let peers = Peers::new(Metadata::Peer, 4);
        let base = segment.memory.base();
        for (piece, len) in [(1, 5000), (4096, 4096), (100, 300_001), (LEN as usize, LEN as usize)] {
            let bytes: Vec<u8> = (0..len).map(|at: usize| (at * 7 + at / 253 + piece) as u8).collect();
            let address = base + LEN - len as u64;
            let moved = move_all(&peers, Operation::Write, &segment.endpoint(), address, &mut bytes.clone(), piece);
            assert_eq!(moved, Outcome::Moved, "version {version}");
            let mut back = vec![0; len];
            let moved = move_all(&peers, Operation::Read, &segment.endpoint(), address, &mut back, piece + 3);
            assert_eq!(moved, Outcome::Moved, "version {version}");
            assert!(back == bytes, "version {version}: {len} bytes in pieces of {piece}");
        }
        let outside = move_all(&peers, Operation::Write, &segment.endpoint(), base + LEN - 1, &mut [1, 2], 2);
        assert!(matches!(outside, Outcome::Rejected(_)), "{outside:?}");
    }
}

#[test]
fn ranges_that_lie_side_by_side_are_moved_also_where_the_peer_has_them_in_two_buffers() {
    const PAGE: u64 = 20_000;
    for buffers in [1, 2] {
        let segment = Segment::new(2);
        let (base, name) = (segment.memory.base(), segment.endpoint());
        let half = LEN / buffers;
        let range = |number| Range { addr: base + number * half, length: half, name: name.clone(), ..Range::default() };
        let ranges = (0..buffers).map(range).collect();
        segment.server.describe(Descriptor::tcp(&name, "127.0.0.1", segment.server.data_port(), ranges));
        let peers = Peers::new(Metadata::Peer, 4);
        // Neighbours around the middle, in another order than their addresses; one ends at the border.
        let addresses = [3, 0, 2, 1, 4, 9].map(|at| base + LEN / 2 - 2 * PAGE + at * PAGE);
        let limit = Limit::within(Duration::from_secs(20));
        let run = |operation, pages: &mut [Vec<u8>]| {
            let pieces: Vec<[libc::iovec; 2]> = pages
                .iter_mut()
                .map(|page| {
                    let (head, tail) = page.split_at_mut(777);
                    [head, tail].map(|part| libc::iovec { iov_base: part.as_mut_ptr().cast(), iov_len: part.len() })
                })
                .collect();
            let jobs: Vec<Job<'_>> = addresses
                .iter()
                .zip(&pieces)
                .map(|(address, pieces)| Job { peer: peers.get(&name), address: *address, len: PAGE, pieces })
                .collect();
            // SAFETY: the pieces are parts of `pages`, which is borrowed for the call.
            let moved = unsafe { transfer(&peers, operation, &jobs, &limit) };
            assert_eq!(moved, vec![Outcome::Moved; jobs.len()], "{buffers} buffers");
        };
        let page = |number: usize| (0..PAGE as usize).map(|at| (at * 13 + number * 101 + at / 255) as u8).collect();
        let mut pages: Vec<Vec<u8>> = (0..addresses.len()).map(page).collect();
        run(Operation::Write, &mut pages);
        let mut back = vec![vec![0; PAGE as usize]; addresses.len()];
        run(Operation::Read, &mut back);
        assert!(back == pages, "{buffers} buffers");
    }
}

#[test]
fn requests_may_be_pipelined_and_cut_anywhere() {
    let segment = Segment::new(2);
    let base = segment.memory.base();
    let mut stream = segment.connect();
    let mut sent = header(Operation::Write, base + 3, 4, true);
    sent.extend_from_slice(b"abcd");
    sent.extend(header(Operation::Read, base + 3, 4, true));
    sent.extend(header(Operation::Read, base + 5, 2, true));
    sent.extend(header(Operation::Write, base + 4, 1, false));
    sent.push(b'X');
    sent.extend(header(Operation::Read, base + 3, 4, false));
    for byte in sent {
        stream.write_all(&[byte]).unwrap();
    }
    let ok = STATUS_OK.to_le_bytes();
    let expected = [&ok[..], &ok[..], b"abcd", &ok[..], b"cd", b"aXcd"].concat();
    assert_eq!(read(&mut stream, expected.len()), expected);
}

#[test]
fn i252_ranges_outside_of_the_segment_are_refused_and_the_connection_closed() {
    let segment = Segment::new(2);
    let base = segment.memory.base();
    let cases = [
        (base - 1, 1),
        (base, LEN + 1),
        (base + LEN, 1),
        (base, 0),
        (base + 1, u64::MAX),
        (u64::MAX, u64::MAX),
        (0, 8),
    ];
    for (address, size) in cases {
        for operation in [Operation::Read, Operation::Write] {
            let mut stream = segment.connect();
            stream.write_all(&header(operation, address, size, true)).unwrap();
            assert_eq!(read(&mut stream, 8), STATUS_REJECTED.to_le_bytes(), "{address:#x} {size}");
            assert_eq!(stream.read(&mut [0]).unwrap(), 0, "closed");
            let mut old = segment.connect();
            old.write_all(&header(operation, address, size, false)).unwrap();
            assert_eq!(old.read(&mut [0]).unwrap(), 0, "closed without a word");
        }
    }
    assert_eq!(segment.server.figures().requests_refused(), cases.len() as u64 * 4);
}

#[test]
fn peers_that_stall_or_vanish_hold_up_nobody() {
    let segment = Segment::new(2);
    let base = segment.memory.base();
    let mut stalled = Vec::new();
    for number in 0..64 {
        let mut stream = segment.connect();
        match number % 4 {
            // Half a header, half a body, a read that is never taken, nothing.
            0 => stream.write_all(&header(Operation::Write, base, 8, true)[..11]).unwrap(),
            1 => stream.write_all(&[header(Operation::Write, base, LEN, true), vec![0; 1000]].concat()).unwrap(),
            2 => (0..40).for_each(|_| stream.write_all(&header(Operation::Read, base, LEN, true)).unwrap()),
            _ => {}
        }
        stalled.push(stream);
    }
    let peers = Peers::new(Metadata::Peer, 4);
    let mut bytes = vec![7; 100_000];
    for _ in 0..20 {
        let moved = move_all(&peers, Operation::Write, &segment.endpoint(), base + 500_000, &mut bytes, 1 << 20);
        assert_eq!(moved, Outcome::Moved);
    }
    for stream in stalled.drain(..32) {
        stream.shutdown(Shutdown::Both).unwrap();
    }
    let moved = move_all(&peers, Operation::Read, &segment.endpoint(), base + 500_000, &mut bytes, 1 << 20);
    assert_eq!((moved, bytes.iter().all(|byte| *byte == 7)), (Outcome::Moved, true));
    segment.server.stop(Duration::from_millis(50));
}

#[test]
fn handshakes_are_answered_and_what_is_none_is_dropped() {
    let segment = Segment::new(2);
    let port = segment.server.handshake_port();
    let limit = || Limit::within(Duration::from_secs(20));
    let probe = handshake::exchange("127.0.0.1", port, Kind::Probe, "{}", &limit()).unwrap();
    assert_eq!(handshake::parse(&probe).unwrap(), (Kind::Probe, r#"{"status":"success"}"#));
    let notify =
        handshake::exchange("127.0.0.1", port, Kind::Notify, r#"{"name":"x","notify_msg":"y"}"#, &limit()).unwrap();
    assert_eq!(handshake::parse(&notify).unwrap(), (Kind::Notify, r#"{"name":"","notify_msg":"success"}"#));
    for bytes in [&[0xff; 8][..], &[0; 8], &[3, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0xff]] {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(bytes).unwrap();
        // What was not read may turn the close into a reset.
        assert!(stream.read(&mut [0]).map_or(true, |read| read == 0), "{bytes:?}");
    }
    // One that says nothing does not keep others waiting.
    let _silent = TcpStream::connect(("127.0.0.1", port)).unwrap();
    assert_eq!(handshake::ask("127.0.0.1", port, &limit()).unwrap().tcp_data_port, segment.server.data_port());
}

/// It sent on after its handshake, and the thread that served it did nothing else, not even end.
#[test]
fn a_peer_that_never_stopped_sending_kept_a_thread_for_itself() {
    let segment = Segment::new(2);
    let port = segment.server.handshake_port();
    let floods: Vec<_> = (0..4)
        .map(|_| {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
            stream.write_all(&[3, 0, 0, 0, 0, 0, 0, 0, 1, b'{', b'}']).unwrap();
            std::thread::spawn(move || while stream.write_all(&[0; 1 << 16]).is_ok() {})
        })
        .collect();
    let limit = Limit::within(Duration::from_secs(60));
    assert_eq!(handshake::ask("127.0.0.1", port, &limit).unwrap().tcp_data_port, segment.server.data_port());
    // Waits for the threads, and ends the floods with their connections.
    segment.server.stop(Duration::from_millis(50));
    drop(segment);
    floods.into_iter().for_each(|flood| flood.join().unwrap());
}

/// What is at the end of a connection: nothing, once it was closed.
fn is_closed(stream: &mut TcpStream) -> bool {
    // What was sent and not read may turn the close into a reset.
    stream.read(&mut [0; 64]).map_or_else(|error| error.kind() == std::io::ErrorKind::ConnectionReset, |read| read == 0)
}

/// A peer that connected and said nothing kept its session, and a descriptor, for ever; so did one that stopped in the middle of a request.
#[test]
fn a_peer_that_said_nothing_kept_a_session_for_ever() {
    let (short, hour) = (Duration::from_millis(300), Duration::from_secs(3600));
    let long = Bounds { stalled: hour, unused: hour, idle: hour, ..Bounds::of_this_process() };
    let segment = Segment::within(2, Bounds { unused: short, ..long });
    // Each waits up to 20 s for its end.
    assert!(is_closed(&mut segment.connect()));
    drop(segment);

    let segment = Segment::within(2, Bounds { stalled: short, ..long });
    let base = segment.memory.base();
    let mut half_a_header = segment.connect();
    half_a_header.write_all(&header(Operation::Write, base, 8, true)[..11]).unwrap();
    let mut half_a_body = segment.connect();
    half_a_body.write_all(&[header(Operation::Write, base, 100, true), vec![0; 10]].concat()).unwrap();
    // Its answers are more than the sockets hold, and it takes none of them.
    let mut deaf = segment.connect();
    (0..64).for_each(|_| deaf.write_all(&header(Operation::Read, base, LEN, true)).unwrap());
    assert!(is_closed(&mut half_a_header) && is_closed(&mut half_a_body));
    let mut silent = segment.connect();
    let began = Instant::now();
    while deaf.write_all(&[0]).is_ok() {
        assert!(began.elapsed() < Duration::from_secs(60), "it was not given up");
        std::thread::sleep(Duration::from_millis(20));
    }
    // One that stands still in the middle of nothing waits on.
    silent.write_all(&header(Operation::Read, base, 1, true)).unwrap();
    assert_eq!(read(&mut silent, 9)[..8], STATUS_OK.to_le_bytes());
    drop(segment);

    // But not for ever either.
    let segment = Segment::within(2, Bounds { idle: short, ..long });
    let mut used = segment.connect();
    used.write_all(&header(Operation::Read, segment.memory.base(), 1, true)).unwrap();
    read(&mut used, 9);
    assert!(is_closed(&mut used));
}

#[test]
fn when_all_sessions_were_taken_nobody_else_was_served() {
    let bounds = Bounds { sessions: 8, yields: Duration::from_millis(200), ..Bounds::of_this_process() };
    let segment = Segment::within(2, bounds);
    let base = segment.memory.base();
    let silent: Vec<TcpStream> = (0..32).map(|_| segment.connect()).collect();
    let peers = Peers::new(Metadata::Peer, 1);
    let mut bytes = vec![7; 1000];
    let began = Instant::now();
    loop {
        match move_all(&peers, Operation::Write, &segment.endpoint(), base, &mut bytes, 1000) {
            Outcome::Moved => break,
            other => assert!(began.elapsed() < Duration::from_secs(60), "{other:?}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(silent);
}

#[test]
fn no_bytes_from_peers_end_the_service() {
    let segment = Segment::new(2);
    let (data, greetings) = (segment.server.data_port(), segment.server.handshake_port());
    bolero::check!().with_type::<(bool, Vec<u8>)>().with_iterations(300).for_each(
        |(data_port, bytes): &(bool, Vec<u8>)| {
            let mut stream = TcpStream::connect(("127.0.0.1", if *data_port { data } else { greetings })).unwrap();
            // The server may close before all is sent.
            let _ = stream.write_all(bytes);
        },
    );
    let peers = Peers::new(Metadata::Peer, 1);
    let moved = move_all(&peers, Operation::Write, &segment.endpoint(), segment.memory.base(), &mut [1; 100], 10);
    assert_eq!(moved, Outcome::Moved);
}
