"""Straight lines of instructions that are alike share what lowering finds out.

An unrolled kernel has thousands of instructions that differ in nothing but where their operands are. What a line of instructions becomes
depends on the form of each of them (operation, attributes, and of each operand dtype, shape, strides and kind of tensor), on which
operands are the same place or may share memory, and on which results nobody else reads. So the first line of a form is lowered as such, and
what came out is the template of all others: only addresses are put in. The forms that a line goes through are the nodes of a tree. Where
nearly every line has a form of its own, those beyond a number are lowered instruction by instruction, by the templates of these.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING, Any

from opennki.execute import build
from opennki.execute.again import again, placed
from opennki.execute.calls import Call
from opennki.execute.group import MAX_GROUP, Group
from opennki.execute.instruction import Broken, Instruction
from opennki.execute.nodes import Divide, Run
from opennki.execute.record import Unsupported
from opennki.execute.sites import Form, Line, Part, Place, Site, Tile, constant, predicates, relation
from opennki.execute.templates import ASIS, Node, give_back, take
from opennki.interpret.steps import Plan
from opennki.interpret.views import Dynamic, View
from opennki.ir.affine import Affine, Range, Var
from opennki.ir.nodes import Access, Alloc, Instr
from opennki.isa.declare import ISA

if TYPE_CHECKING:
    from opennki.execute.lower import Lowering

# what a template has not of a call
_OF_KERNEL: dict[str, Any] = {"addresses": [], "instrs": (), "bounds": [], "clips": [], "preds": [], "indices": []}
LEAST, SHARE = 48, 100  # forms of lines that are lowered as such: so many, and one more for so many instructions


class Lines:
    """The lines that are open, which share no memory but what they only read, and the forms of all before."""

    def __init__(self, lowering: Lowering) -> None:
        self.lowering = lowering
        table = self.table = take(build.level())
        self.turn = table.turn
        self.tiles, self.kinds, self.names, self.forms, self.plain = table.tiles, table.kinds, table.names, table.forms, table.plain
        self.allocs: dict[Alloc, tuple[int, int, bool]] = {}  # slot, number of the kind, whether nobody else may need it
        self.left = LEAST + lowering.count // SHARE
        self.open: list[Line] = []  # by their order
        self.count = 0  # instructions in them
        self.order = 0
        self.places: dict[int, list[Place]] = {}  # of the open lines, by slot

    # ---- forms ----
    def _alloc(self, alloc: Alloc) -> tuple[int, int, bool]:
        kind = self.kinds.setdefault((alloc.shape, alloc.dtype, alloc.space, alloc.kind, alloc.pdim), len(self.kinds))
        made = self.allocs[alloc] = self.lowering.layout.alloc(alloc), kind, alloc.kind == "local" and alloc.on_chip
        return made

    def _is_plain(self, op: str) -> bool:
        decl = ISA[op]
        found = self.plain[op] = not (decl.random or decl.suspends or decl.family in ("print", "sync", "collective"))
        return found

    def site(self, instr: Instr, ranges: dict[Var, Range], tests: tuple[Affine, ...] = ()) -> Site | None:
        """An instruction as one of its form; None where it has to be looked at by itself. `tests`: those of branches that
        it is in, but shall not stay in (see `Instruction.under`)."""
        plain = self.plain.get(instr.op)
        if not (self._is_plain(instr.op) if plain is None else plain):
            return None
        site = Site(instr, ranges, tests)
        parts = site.parts
        key: list[Any] = [instr.op, instr.engine]
        for value in (*instr.results, *instr.operands):
            kind = value.__class__
            if value is None or kind is str:
                key.append(value)
            elif kind is Access:
                part = self._part(value, site)
                if part is None:
                    return None
                number = len(parts)
                parts.append(part)
                key.append(part[4].number)
                if number in site.starts and not self._indexed(value, number, site, key):
                    return None
                if value.mask:
                    key.append(predicates(value.mask, site.exprs))
            elif kind is int or kind is bool:
                key.append((kind, value))
            else:
                key.append(constant(value, site.exprs, ranges))
        if site.unproven:
            key.append(("unproven", *site.unproven))
        if instr.mask:
            key.append(predicates(instr.mask, site.exprs))
        count = len(parts)
        if count > 1 and (parts[0][1] == parts[1][1] if count == 2 else len({part[1] for part in parts}) < count):  # how they relate
            key += [(i, j, relation(p, q[2], q[3], q[4])) for i, p in enumerate(parts) for j, q in enumerate(parts[:i]) if p[1] == q[1]]
        if tests:
            key.append(("if", len(tests)))
            site.exprs += tests
        if len(site.exprs) > 1:
            ids = [id(e) for e in site.exprs]
            key.append(tuple([ids.index(i) for i in ids]))  # which are the same object
        name = tuple(key)
        try:
            site.form = self.forms[name]
        except KeyError:
            site.form = self.forms[name] = self._form(site)
        except TypeError:
            return None  # an array comes with it
        return None if site.form is None else site

    def _indexed(self, access: Access, number: int, site: Site, key: list[Any]) -> bool:
        """Take in the tiles that runtime indices are read from; False where that is beyond what is looked at."""
        site.exprs.append(site.starts[number])
        for axis, dim in enumerate(access.dims):
            if dim.dyn is not None:
                part = self._part(dim.dyn, site)
                if part is None or len(site.parts) in site.starts:
                    return False
                site.parts.append(part)
                site.exprs.append(dim.base)
                key.append(("at", axis, part[4].number))
        return not site.unproven

    def _part(self, access: Access, site: Site) -> Part | None:
        slot, kind, _ = self.allocs.get(access.alloc) or self._alloc(access.alloc)
        dims = access.dims
        if len(dims) == 2:
            one, two = dims
            form: Any = kind, access.dtype, access.shape, access.view, one.strides, two.strides
        else:
            form = kind, access.dtype, access.shape, access.view, *[d.strides for d in dims]
        tile = self.tiles.get(form)
        if tile is None:
            tile = self.tiles[form] = Tile(len(self.tiles), access, self.names)
        if tile.empty:
            return None
        offset = 0
        for dim, (unit, low, high) in zip(dims, tile.dims):
            base = dim.base
            const = base.const
            if base.terms or dim.dyn is not None or not low <= const <= high:
                break
            offset += const * unit
        else:
            return access, slot, offset, (), tile, (slot, offset, (), tile.place)
        offset = 0
        terms: Any = ()
        dynamic = False
        for axis, (dim, (unit, low, high)) in enumerate(zip(dims, tile.dims)):
            base = dim.base
            const = base.const
            if dim.dyn is not None:
                dynamic = True
            elif base.terms:
                least, most = base.range(site.ranges)
                if least < low or most > high:
                    site.unproven.append((len(site.parts), axis))
            elif not low <= const <= high:
                site.unproven.append((len(site.parts), axis))
            if base.terms:
                moving = tuple([(a, c * unit) for a, c in base.terms])
                terms = Affine(0, terms).add(Affine(0, moving)).terms if terms else moving
            if const:
                offset += const * unit
        if dynamic:
            site.starts[len(site.parts)] = Affine(offset, terms)
            offset, terms = 0, ()
        return access, slot, offset, terms, tile, (slot, offset, terms, tile.place)

    def _form(self, site: Site) -> Form | None:
        try:
            return Form(len(self.forms), self.real(site), [part[0] for part in site.parts])
        except (Unsupported, KeyError):
            return None

    def real(self, site: Site) -> Instruction:
        """The instruction, recorded. Raises Unsupported."""
        form = site.form
        if site.real is None and form is not None and form.pattern is not None:
            site.real = again(self.lowering, form.pattern, form.order, site)
        if site.real is None:
            lowering, tape = self.lowering, self.lowering.tape
            instr, numbers = site.instr, {id(part[0]): n for n, part in enumerate(site.parts)}

            def view(access: Access, layout: Any, ranges: Any, what: str, loc: Any, masked: bool = False) -> View:
                number = numbers[id(access)]
                if number in site.starts:
                    made = View(access, layout, ranges, what, loc, masked)
                    lowering.offsets[made] = site.starts[number]
                    return made
                unproven = [axis for n, axis in site.unproven if n == number] if site.unproven else None
                return placed(lowering, site.parts[number], what, loc, unproven)

            plan = Plan(instr, lowering.layout, site.ranges, tape.kernel.loc(instr.loc), set(), lowering.loops, tape.seed, (), view)
            site.real = Instruction(lowering, plan, site.ranges)
            site.real.repeated = True  # its plan is not enough for the interpreter
            site.real.record()
            if site.tests:
                site.real.under(site.tests)
        return site.real

    # ---- the open lines ----
    def add(self, site: Site) -> None:
        """Append an instruction: to the line that it meets, or as a line of its own. What it cannot join is lowered first."""
        self.order += 1
        if not site.form.joins:
            self.flush()
            self._alone(site)
            return
        met, found = self._met(site)
        line = met[0] if len(met) == 1 else self._together(met) if met else self._line()
        if line is not None and len(met) > 1:
            met, found = self._met(site)
        if line is None or not self._joined(line, site, found):
            if not met and line is not None:
                self.open.remove(line)
            for one in met:
                self._close(one)
            line = self._line() if met else None
            if line is None or not self._joined(line, site, []):
                if line is not None:
                    self.open.remove(line)
                self._alone(site)
                return
        if self.count > MAX_GROUP:
            self._close(self.open[0])

    def join(self, site: Site) -> bool:
        """Append an instruction to the one line that it meets, if there is one that it joins."""
        self.order += 1
        met, found = self._met(site)
        return site.form.joins and len(met) == 1 and self.count <= MAX_GROUP and self._joined(met[0], site, found)

    def _line(self) -> Line:
        line = Line(self.table.root, self.order)
        self.open.append(line)
        return line

    def _met(self, site: Site) -> tuple[list[Line], list[Any]]:
        """The open lines that an instruction meets, and the places that its operands are not apart from: (operand, place, relation)."""
        met: list[Line] = []
        found: list[Any] = []
        for n, writes in site.form.uses:
            part = site.parts[n]
            places = self.places.get(part[1])
            if places is None:
                continue
            for place in places:
                if writes or place.written:
                    how = relation(part, place.offset, place.terms, place.tile)
                    if how == "apart":
                        continue
                    found.append((n, place, how))
                elif not part[4].shared or place.name != part[5]:
                    continue  # both only read; what is large is better read once
                if place.line not in met:
                    met.append(place.line)
        return met, found

    def _together(self, met: list[Line]) -> Line | None:
        """Lines as one; None where they cannot be."""
        if sum(len(line.sites) for line in met) >= MAX_GROUP:
            return None
        for line in met:
            self._forget(line)
        made = Line(self.table.root, min([line.order for line in met]))
        insort(self.open, made, key=_order)
        for site in sorted([site for line in met for site in line.sites], key=_order):
            if not self._joined(made, site, self._met(site)[1]):
                self._forget(made)
                for line in met:
                    insort(self.open, line, key=_order)
                    self.count += len(line.sites)
                    for place in line.places.values():
                        self.places.setdefault(place.name[0], []).append(place)
                return None
        return made

    def _joined(self, line: Line, site: Site, found: list[Any]) -> bool:
        """Append an instruction to a line, if it joins it."""
        own, parts, uses = line.places, site.parts, site.form.uses
        key: list[Any] = [site.form.number]
        for n, writes in uses:
            same = own.get(parts[n][5]) if own else None
            if same is not None and (same.written or not writes):
                key.append(same.number)  # what it is not apart from is known of that
            else:
                key.append(tuple([(p.number, how) for k, p, how in found if k == n and p.line is line]) if found else ())
        following = line.node.next
        form = tuple(key)
        node = following.get(form)
        if node is None or node.met != self.turn:
            if self.left <= 0:
                return False
            if node is None:
                group = self._recorded(line)
                node = following[form] = Node(group.add(self.real(site)), self.turn)
                self.table.nodes += 1
            node.met = self.turn
        if not node.joins:
            return False
        line.node = node
        line.sites.append(site)
        self.count += 1
        if not site.order:
            site.order = self.order
        for n, writes in uses:
            part = parts[n]
            place = own.get(part[5])
            if place is None:
                place = own[part[5]] = Place(line, part)
                places = self.places.get(part[1])
                if places is None:
                    self.places[part[1]] = [place]
                else:
                    places.append(place)
            if writes:
                place.written = True
        return True

    def _recorded(self, line: Line) -> Group:
        """The group of a line, with all of its instructions recorded."""
        group = line.group
        if group is None:
            group = line.group = Group(self.lowering)
        for site in line.sites[len(group.ones) :]:
            joined = group.add(self.real(site))
            assert joined
        return group

    def _forget(self, line: Line) -> None:
        """A line is not open any more."""
        self.open.remove(line)
        self.count -= len(line.sites)
        for place in line.places.values():
            places = self.places[place.name[0]]
            if len(places) == 1:
                del self.places[place.name[0]]
            else:
                places.remove(place)

    def done(self) -> None:
        """All lines are lowered."""
        give_back(self.table)

    def flush(self) -> None:
        """Lower all open lines."""
        if self.open:
            lines, self.open = self.open, []
            self.places.clear()
            self.count = 0
            for line in lines:
                self._lower(line)

    def _close(self, line: Line) -> None:
        """Lower a line."""
        self._forget(line)
        self._lower(line)

    def _lower(self, line: Line) -> None:
        sites, node = line.sites, line.node
        needed = self._needed(sites)
        template, met = node.made.get(needed, (ASIS, 0))
        if met != self.turn:
            if self.left <= 0:
                for site in sites:
                    self._alone(site)
                return
            self.left -= 1
            node.made[needed] = template, self.turn
        if template is not ASIS:
            self._instance(template, sites)
            return
        group = self._recorded(line)
        found = self._lowered(sites, lambda: self.lowering.flush_group(group))
        if met != self.turn:
            node.made[needed] = found, self.turn

    def _needed(self, sites: list[Site]) -> tuple[bool, ...]:
        """Which results somebody outside of a line uses."""
        inside = {site.instr for site in sites}
        users, out = self.lowering.users, []
        for site in sites:
            for n in site.form.outs:
                alloc = site.parts[n][0].alloc
                out.append(not self.allocs[alloc][2] or not users.get(alloc, inside) <= inside)
        return tuple(out)

    def _alone(self, site: Site) -> None:
        template, met = site.form.template or (ASIS, 0)
        if template is not ASIS:
            self._instance(template, [site])
            return
        one = self.real(site)
        found = self._lowered([site], lambda: self.lowering.alone(one))
        if met != self.turn:
            site.form.template = found, self.turn

    def _lowered(self, sites: list[Site], lower: Any) -> Any:
        """Lower a line, and make a template of what comes out."""
        lowering = self.lowering
        marks = len(lowering.out), len(lowering.broken), len(lowering.fallbacks)
        lower()
        made = [node for node in lowering.out[marks[0] :] if node.__class__ is not Divide]
        if len(lowering.fallbacks) != marks[2] or any([node.__class__ is not Run for node in made]):
            return ASIS
        failed: list[Any] = []
        if len(lowering.broken) != marks[1]:
            reported = [bound[-1] for node in made for bound in node.call.bounds]
            failed = lowering.broken[marks[1] : len(lowering.broken) - len(reported)]  # by runtime indices: of steps, alone
            if reported != list(range(marks[1] + 1 + len(failed), len(lowering.broken) + 1)):
                return ASIS  # there are errors besides those of indices
            if failed and (len(made) != 1 or any(not isinstance(broken, Broken) or broken.axis is not None for broken in failed)):
                return ASIS
        views: dict[int, int] = {}
        accesses: dict[int, int] = {}
        exprs: dict[int, int] = {}
        base = count = 0
        for site in sites:
            assert site.real is not None
            for n, k in enumerate(site.form.order):
                views[site.real.first + n] = base + k
            for k, part in enumerate(site.parts):
                accesses.setdefault(id(part[0]), base + k)
            base += len(site.parts)
            if any([id(e) in exprs for e in site.exprs]):
                return ASIS  # two instructions share an expression, which those of another line need not
            for e in site.exprs:
                exprs.setdefault(id(e), count)
                count += 1
        instrs = {site.instr: n for n, site in enumerate(sites)}
        template = []
        for node in made:
            call = node.call
            if len(call.sources) != len(call.addresses) or any([id(a) not in accesses for a, _ in node.touches]):
                return ASIS
            bounds = []
            for _, *along, number in call.bounds:
                view = lowering.broken[number - 1].view
                bounds.append((accesses[id(view.access)], lowering.broken[number - 1].axis, along, view.what))
            if any([id(e) not in exprs for e in (*call.preds, *call.indices, *[c[0] for c in call.clips])]):
                return ASIS  # not the expression of an operand, but computed from it
            template.append((
                {**call.__dict__, **_OF_KERNEL},
                [(views[n] if n in views else accesses[id(lowering.views[n].access)], extra) for n, extra in call.sources],
                [(accesses[id(a)], w) for a, w in node.touches],
                [instrs[i] for i in call.instrs], [exprs[id(e)] for e in call.preds], [exprs[id(e)] for e in call.indices],
                [(exprs[id(e)], axis, stride) for e, axis, stride in call.clips], bounds,
                [(accesses[id(broken.view.access)], broken.view.what) for broken in failed],
            ))  # fmt: skip
        return template

    def _instance(self, template: Any, sites: list[Site]) -> None:
        """Append what a line becomes by its template."""
        out, ranges = self.lowering.out, sites[0].ranges
        parts = sites[0].parts if len(sites) == 1 else [part for site in sites for part in site.parts]
        linear = self.lowering.linear
        for fields, sources, touches, instrs, preds, indices, clips, bounds, failed in template:
            addresses = []
            for n, extra in sources:
                _, slot, offset, terms, _, _ = parts[n]
                expr = Affine(offset + extra, terms)
                addresses.append((linear(expr) if terms else expr, slot))
            made = Call.__new__(Call)
            made.__dict__.update(fields, addresses=addresses, instrs=tuple([sites[n].instr for n in instrs]))
            if failed:
                made.errors = len(self.lowering.broken)
                for n, what in failed:
                    self._broken(parts[n], None, what, sites[0])
            if bounds:
                made.bounds = [self._bound(parts[n], axis, along, what, sites[0]) for n, axis, along, what in bounds]
            if preds or indices or clips:
                exprs = [e for site in sites for e in site.exprs]
                made.clips = [(linear(exprs[n]), axis, stride) for n, axis, stride in clips]
                made.preds, made.indices = [linear(exprs[n]) for n in preds], [linear(exprs[n]) for n in indices]
            out.append(Run(made, [(parts[n][0], written) for n, written in touches], ranges))

    def _bound(self, part: Part, axis: int, along: Any, what: str, site: Site) -> Any:
        """The check of an index that may be outside of its tensor."""
        self._broken(part, axis, what, site)
        return self.lowering.linear(part[0].dims[axis].base), *along, len(self.lowering.broken)

    def _broken(self, part: Part, axis: int | None, what: str, site: Site) -> None:
        """What is reported of an index that is outside; axis None: one that was read from memory."""
        view = placed(self.lowering, part, what, self.lowering.tape.kernel.loc(site.instr.loc))
        if axis is None:
            view.dynamic = Dynamic.__new__(Dynamic)
            view.dynamic.view = view
        self.lowering.broken.append(Broken(view, axis))


def _order(one: Site | Line) -> int:
    return one.order
