//! Rules of the linker face. What a plugin must not touch is looked at for a moment after it was given back, so a rule that passes says
//! that nothing was seen, and one that fails that something was.

mod face;
mod loads;
mod model;
mod offloads;
mod refusals;
mod reset;
mod scene;

use super::Rule;
use crate::Capability;

/// The table of the linker face is there.
pub(crate) const TABLE: &str = "load.linker_table";
/// What is loaded is what was stored.
pub(crate) const LOAD: &str = "linker.load";
/// A verdict for every page.
pub(crate) const STATUSES: &str = "linker.statuses";
/// A word for every layer.
pub(crate) const LAYERS: &str = "linker.layers";
/// What is offloaded is stored.
pub(crate) const OFFLOAD: &str = "linker.offload";

/// An end before its time.
pub(crate) const DEADLINE: &str = "linker.deadline";
/// A batch without loads.
pub(crate) const EMPTY_START: &str = "linker.empty_start";
/// Nothing is written too early.
pub(crate) const START_READY: &str = "linker.start_ready";
/// Popping when there is nothing to pop.
pub(crate) const POP_EMPTY: &str = "linker.pop_empty";

const LINKER: &[Capability] = &[Capability::Linker];
const RANGES: &[Capability] = &[Capability::Linker, Capability::Ranges];

/// The rules of the model end here when one of these is broken: it would find the same again.
pub(crate) fn simple_rules() -> impl Iterator<Item = &'static Rule> {
    RULES.iter().filter(|rule| rule.id != "linker.model")
}

pub(super) const RULES: &[Rule] = &[
    Rule::new("linker.lookup", "6", "lookup answers every restorable length as batch_exists does", &[loads::lookup])
        .needs(LINKER),
    Rule::new(
        OFFLOAD,
        "6",
        "what is offloaded is stored, and completes with a status for each page",
        &[offloads::offload],
    )
    .needs(LINKER),
    Rule::new(
        "linker.offload_ready",
        "6",
        "no page of an offload is read before all ready handles allow it",
        &[offloads::ready],
    )
    .needs(LINKER),
    Rule::new(
        "linker.offload_atomic",
        "6",
        "the pages of an offload become visible all at once, in all pools",
        &[offloads::atomic],
    )
    .needs(LINKER),
    Rule::new(
        "linker.offload_deadline",
        "6",
        "an offload that is late fails as a whole: no page of it becomes visible",
        &[offloads::deadline],
    )
    .needs(LINKER),
    Rule::new(
        "linker.offload_order",
        "6",
        "offloads complete in the order of queueing, and are counted",
        &[offloads::order],
    )
    .needs(LINKER),
    Rule::new(
        "linker.offload_refused",
        "6",
        "an offload that can't be served is refused; its pages are free at once",
        &[refusals::offload],
    )
    .needs(LINKER),
    Rule::new(
        POP_EMPTY,
        "6",
        "popping when no offload has completed answers not found, and does not wait",
        &[refusals::pop],
    )
    .needs(LINKER),
    Rule::new(LOAD, "6", "a load fills its pages with the bytes that were stored", &[loads::load]).needs(LINKER),
    Rule::new(STATUSES, "6", "each page of a load has a verdict of its own", &[loads::statuses]).needs(LINKER),
    Rule::new(LAYERS, "6", "every layer is settled without a finish, and the host is told", &[loads::layers])
        .needs(LINKER),
    Rule::new("linker.layer_bytes", "6", "the bytes of a settled layer are final", &[loads::layer_bytes]).needs(LINKER),
    Rule::new("linker.ranges", "6", "a load of a range of layers leaves the other layers alone", &[loads::ranges])
        .needs(RANGES),
    Rule::new(EMPTY_START, "6", "with nothing queued every layer is settled at once", &[loads::empty_start])
        .needs(LINKER),
    Rule::new(START_READY, "6", "no page of a load is written before all ready handles allow it", &[loads::ready])
        .needs(LINKER),
    Rule::new(
        "linker.start_refused",
        "6",
        "a start that is refused starts nothing and forgets what was queued",
        &[refusals::start],
    )
    .needs(LINKER),
    Rule::new(
        "linker.double_load",
        "6",
        "the load of a request that is queued already is refused",
        &[refusals::double_load],
    )
    .needs(LINKER),
    Rule::new("linker.load_refused", "6", "a load of a pool that is not registered is refused", &[refusals::load])
        .needs(LINKER),
    Rule::new("linker.cancel", "6", "a queued load is taken back, and its pages are not touched", &[loads::cancel])
        .needs(LINKER),
    Rule::new(
        "linker.cancel_refused",
        "6",
        "cancelling a load that is not queued, or has started, is not found",
        &[refusals::cancel],
    )
    .needs(LINKER),
    Rule::new("linker.finish_unknown", "6", "finishing a batch that does not run is not found", &[refusals::finish])
        .needs(LINKER),
    Rule::new(
        DEADLINE,
        "6",
        "a finish at its deadline has ended the load: all is settled, and no page is touched again",
        &[loads::deadline, loads::cancelled],
    )
    .needs(LINKER),
    Rule::new("linker.beside", "5", "a finish that waits keeps no lookup, cancel or other batch out", &[loads::beside])
        .needs(LINKER),
    Rule::new(
        "linker.reset",
        "6",
        "a reset ends loads and offloads; none of their pages is touched again",
        &[reset::ends],
    )
    .needs(LINKER),
    Rule::new(
        "linker.reset_usable",
        "6",
        "after a reset completions are forgotten and the face works",
        &[reset::usable],
    )
    .needs(LINKER),
    Rule::new("linker.model", "6", "random sequences of legal calls give what a model gives", &[model::random])
        .needs(LINKER),
];
