//! Who this worker is: everything that changes the bytes of a page, and its digest.

use serde::Serialize;
use sha2::{Digest, Sha256};

use super::inspect::hex;
use crate::config::KeyScheme;

/// What the namespace of pages binds. Two workers share pages only when all of this is equal.
///
/// The name under which a model is served is not part of it: two checkpoints may go by one name, and one by two.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Namespace {
    /// Version of the way pages are made: raised when the engine changes the bytes of a page.
    pub format: u32,
    /// Architecture name of the checkpoint.
    pub architecture: String,
    /// SHA-256 of the weights, in hex.
    pub weights_sha256: String,
    /// Element type of K and V.
    pub kv_dtype: String,
    /// Layout of host pages.
    pub host_layout: String,
    /// Tokens a page.
    pub page_tokens: u32,
    /// Layers in a page.
    pub layers: u32,
    /// K and V heads of this rank.
    pub kv_heads: u32,
    /// Elements of a K head.
    pub head_dim_k: u32,
    /// Elements of a V head.
    pub head_dim_v: u32,
    /// Tensor-parallel rank and size.
    pub tp: (u32, u32),
    /// Pipeline stage and number of stages.
    pub pp: (u32, u32),
    /// Context-parallel rank and size.
    pub cp: (u32, u32),
    /// Which kernels write pages.
    pub numerics_id: String,
}

/// Version of the way pages are made.
pub const PAGE_FORMAT: u32 = 1;

impl Namespace {
    /// The bound values as JSON, in a fixed order.
    pub fn json(&self) -> String {
        // A struct of strings and numbers always serialises.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The bound values, and how pages are named where that is not kvdock's own way. Their digest is another one then.
    pub fn json_named(&self, scheme: KeyScheme) -> String {
        let json = self.json();
        match (scheme, json.strip_suffix('}')) {
            (KeyScheme::Kvdock, _) | (_, None) => json,
            (scheme, Some(open)) => format!("{open},\"key_scheme\":\"{}\"}}", scheme.as_str()),
        }
    }

    /// SHA-256 of [`Namespace::json`].
    pub fn digest(&self) -> [u8; 32] {
        Sha256::digest(self.json().as_bytes()).into()
    }
}

/// What a backend is told of this worker.
#[derive(Debug, Clone)]
pub struct WorkerIdentity {
    /// The namespace.
    pub namespace: Namespace,
    /// Name of the model as clients use it.
    pub model_name: String,
    /// SHA-256 of the weights.
    pub weights_digest: [u8; 32],
    /// Tensor-parallel rank and size. With replicated pages the namespace does not tell the ranks apart.
    pub tp: (u32, u32),
    /// Context-parallel rank and size. The namespace never tells these ranks apart: all of them hold the same bytes.
    pub cp: (u32, u32),
    /// Every tensor-parallel rank holds the same bytes, which the first one writes.
    pub replicated: bool,
}

impl WorkerIdentity {
    /// A worker without other ranks.
    pub fn new(namespace: Namespace, model_name: &str, weights_digest: [u8; 32]) -> Self {
        let namespace = Namespace { weights_sha256: hex(&weights_digest), ..namespace };
        WorkerIdentity {
            tp: namespace.tp,
            cp: namespace.cp,
            namespace,
            model_name: model_name.to_owned(),
            weights_digest,
            replicated: false,
        }
    }

    /// As [`WorkerIdentity::new`], of a group of as many ranks as `namespace.tp` and `namespace.cp` say. If `replicated`, all tensor-parallel ranks hold
    /// the same bytes.
    pub fn of_ranks(namespace: Namespace, model_name: &str, weights_digest: [u8; 32], replicated: bool) -> Self {
        WorkerIdentity { replicated, ..WorkerIdentity::new(namespace, model_name, weights_digest) }
    }

    /// Ranks of its group: the tensor-parallel ones of the first context-parallel rank, then those of the next.
    pub fn ranks(&self) -> u32 {
        self.tp.1 * self.cp.1
    }

    /// The ranks that write, which come first: rank r holds what rank r modulo their number holds.
    pub fn writers(&self) -> u32 {
        if self.replicated { 1 } else { self.tp.1 }
    }

    /// The worker that is rank `rank` of the group. Pages that differ between ranks are in a namespace of the rank's own.
    pub fn of_rank(&self, rank: u32) -> Self {
        let shares = self.tp.1.max(1);
        let (tp, cp) = ((rank % shares, shares), (rank / shares, self.cp.1));
        let named = if self.replicated { (0, shares) } else { tp };
        let namespace = Namespace { tp: named, cp: (0, self.cp.1), ..self.namespace.clone() };
        WorkerIdentity { tp, cp, namespace, ..self.clone() }
    }

    /// Whether this rank stores pages that other ranks hold alike.
    pub fn is_writer(&self) -> bool {
        (self.tp.0, self.cp.0) == (0, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn namespace() -> Namespace {
        Namespace {
            format: PAGE_FORMAT,
            architecture: "llama".into(),
            weights_sha256: "00".into(),
            kv_dtype: "f16".into(),
            host_layout: "page_first".into(),
            page_tokens: 16,
            layers: 30,
            kv_heads: 3,
            head_dim_k: 64,
            head_dim_v: 64,
            tp: (0, 1),
            pp: (0, 1),
            cp: (0, 1),
            numerics_id: "cpu-1".into(),
        }
    }

    #[test]
    fn i33268_dtype_and_layout_are_part_of_the_identity() {
        let base = namespace();
        for other in [
            Namespace { kv_dtype: "bf16".into(), ..base.clone() },
            Namespace { host_layout: "layer_first".into(), ..base.clone() },
            Namespace { page_tokens: 32, ..base.clone() },
            Namespace { numerics_id: "cpu-2".into(), ..base.clone() },
            Namespace { tp: (0, 2), ..base.clone() },
            Namespace { pp: (1, 2), ..base.clone() },
            Namespace { cp: (1, 2), ..base.clone() },
        ] {
            assert_ne!(base.digest(), other.digest(), "{other:?}");
        }
    }

    #[test]
    fn ranks_are_told_apart_where_their_bytes_differ() {
        let of = |replicated: bool| {
            let group = WorkerIdentity::of_ranks(Namespace { tp: (0, 2), ..namespace() }, "m", [1; 32], replicated);
            [group.of_rank(0), group.of_rank(1)]
        };
        let [first, second] = of(false);
        assert_ne!(first.namespace.digest(), second.namespace.digest());
        assert_eq!((second.namespace.tp, second.tp), ((1, 2), (1, 2)));
        let [first, second] = of(true);
        assert_eq!(first.namespace.digest(), second.namespace.digest(), "one object for all");
        assert_eq!((second.tp, first.is_writer(), second.is_writer()), ((1, 2), true, false));
        let alone = WorkerIdentity::new(namespace(), "m", [1; 32]);
        assert_ne!(alone.namespace.digest(), first.namespace.digest(), "ranks add in another order than one alone");
    }

    #[test]
    fn context_parallel_ranks_share_what_the_first_of_them_writes() {
        let of = |replicated: bool| {
            let namespace = Namespace { tp: (0, 2), cp: (0, 2), ..namespace() };
            let group = WorkerIdentity::of_ranks(namespace, "m", [1; 32], replicated);
            ((0..group.ranks()).map(|rank| group.of_rank(rank)).collect::<Vec<_>>(), group.writers())
        };
        let (ranks, writers) = of(false);
        let places: Vec<_> = ranks.iter().map(|rank| (rank.cp.0, rank.tp.0)).collect();
        assert_eq!((places, writers), (vec![(0, 0), (0, 1), (1, 0), (1, 1)], 2));
        for (number, rank) in ranks.iter().enumerate() {
            let same = ranks.iter().map(|other| other.namespace.digest() == rank.namespace.digest());
            let expected = (0..4).map(|other| other % 2 == number % 2);
            assert!(same.eq(expected), "rank {number}: {:?}", rank.namespace);
            assert_eq!(rank.namespace.cp, (0, 2));
        }
        let (ranks, writers) = of(true);
        assert_eq!(writers, 1);
        assert!(ranks.iter().all(|rank| rank.namespace.digest() == ranks[0].namespace.digest()));
        assert_eq!(ranks.iter().map(WorkerIdentity::is_writer).collect::<Vec<_>>(), [true, false, false, false]);
    }

    #[test]
    fn a_foreign_key_scheme_is_told_beside_what_is_bound() {
        let base = namespace();
        assert_eq!(base.json_named(KeyScheme::Kvdock), base.json());
        let named: serde_json::Value = serde_json::from_str(&base.json_named(KeyScheme::Sglang)).unwrap();
        assert_eq!(named["key_scheme"], "sglang");
        assert_eq!(named["kv_dtype"], "f16");
    }

    #[test]
    fn i24758_models_of_one_name_differ_by_their_weights() {
        let one = WorkerIdentity::new(namespace(), "m", [1; 32]);
        let two = WorkerIdentity::new(namespace(), "m", [2; 32]);
        assert_ne!(one.namespace.digest(), two.namespace.digest());
        let renamed = WorkerIdentity::new(namespace(), "other", [1; 32]);
        assert_eq!(one.namespace.digest(), renamed.namespace.digest());
    }
}
