"""The lean NumPy interpreter that ours is measured against: no checks, one dictionary dispatch per instruction, slices as views.

Its miniature IR holds the same kernels as `interpreter.py`, instruction by instruction.
"""
# ruff: noqa

import numpy as np, ml_dtypes

BF = ml_dtypes.bfloat16
NPDT = {"f32": np.float32, "bf16": BF}


class Aff:  # affine index expression
    __slots__ = ("c", "k")

    def __init__(s, c=None, k=0):
        s.c = dict(c or {})
        s.k = k

    def __mul__(s, n):
        return Aff({v: x * n for v, x in s.c.items()}, s.k * n)

    def __add__(s, o):
        o = o if isinstance(o, Aff) else Aff({}, o)
        c = dict(s.c)
        for v, x in o.c.items():
            c[v] = c.get(v, 0) + x
        return Aff(c, s.k + o.k)

    def ev(s, env):
        r = s.k
        for v, x in s.c.items():
            r += env[v] * x
        return r

    def src(s):
        t = [f"{v}*{x}" if x != 1 else v for v, x in s.c.items() if x]
        if s.k or not t:
            t.append(str(s.k))
        return "(" + "+".join(t) + ")"


def A(x):
    return x if isinstance(x, Aff) else Aff({}, x)


class Acc:  # access: buffer + per-dim (offset,size,step)
    def __init__(s, buf, dims):
        s.buf = buf
        s.dims = [(A(o), n, st) for o, n, st in dims]

    @property
    def shape(s):
        return tuple(n for _, n, _ in s.dims)


class Buf:
    def __init__(s, name, shape, dt, space):
        s.name = name
        s.shape = tuple(shape)
        s.dt = dt
        s.space = space

    def __getitem__(s, ix):  # ix: tuple of (offset,size) / (offset,size,step)
        return Acc(s, [(i[0], i[1], i[2] if len(i) > 2 else 1) for i in ix])

    def all(s):
        return Acc(s, [(0, n, 1) for n in s.shape])


class Loop:
    def __init__(s, var, n, par):
        s.var = var
        s.n = n
        s.par = par
        s.body = []


class Ins:
    def __init__(_S, opname, out, ins, **kw):
        _S.op = opname
        _S.out = out
        _S.ins = ins
        _S.kw = kw


class Kern:
    def __init__(s, name):
        s.name = name
        s.hbm = {}
        s.bufs = {}
        s.body = []
        s.st = [s.body]

    def tensor(s, n, shape, dt, out=False):
        b = Buf(n, shape, dt, "hbm")
        b.out = out
        s.hbm[n] = b
        return b

    def tile(s, shape, dt, space="sbuf", name=None):
        n = name or f"t{len(s.bufs)}"
        b = Buf(n, shape, dt, space)
        s.bufs[n] = b
        return b

    def loop(s, var, n, par=True):
        k = s

        class C:
            def __enter__(c):
                l = Loop(var, n, par)
                k.st[-1].append(l)
                k.st.append(l.body)
                return Aff({var: 1})

            def __exit__(c, *a):
                k.st.pop()

        return C()

    def ins(_S, opname, out, *ins, **kw):
        f = lambda b: b.all() if isinstance(b, Buf) else b
        kw = {k: f(v) for k, v in kw.items()}
        _S.st[-1].append(Ins(opname, f(out), [f(i) for i in ins], **kw))


# ---------------------------------------------------------------- kernels
def k_matmul(N=2048, dt="f32"):
    k = Kern("matmul_" + dt)
    L = k.tensor("lhsT", (N, N), dt)
    R = k.tensor("rhs", (N, N), dt)
    O = k.tensor("out", (N, N), dt, True)
    with k.loop("m", N // 128) as m:
        with k.loop("n", N // 512) as n:
            ps = k.tile((128, 512), "f32", "psum")
            k.ins("memset", ps, val=0.0)
            with k.loop("kk", N // 128, par=False) as kk:
                a = k.tile((128, 128), dt)
                b = k.tile((128, 512), dt)
                k.ins("load", a, L[(kk * 128, 128), (m * 128, 128)])
                k.ins("load", b, R[(kk * 128, 128), (n * 512, 512)])
                k.ins("matmul", ps, a, b)
            o = k.tile((128, 512), dt)
            k.ins("act", o, ps, func="copy", scale=1.0)
            k.ins("store", O[(m * 128, 128), (n * 512, 512)], o)
    return k


def k_flash(S=2048, d=128):
    k = Kern("flash")
    Q = k.tensor("q", (d, S), "bf16")
    K = k.tensor("k", (d, S), "bf16")
    V = k.tensor("v", (S, d), "bf16")
    O = k.tensor("out", (S, d), "bf16", True)
    T = lambda s, dt="f32", sp="sbuf": k.tile(s, dt, sp)
    with k.loop("qi", S // 128) as qi:
        q = T((128, 128), "bf16")
        m = T((128, 1))
        l = T((128, 1))
        acc = T((128, d))
        k.ins("load", q, Q[(0, d), (qi * 128, 128)])
        k.ins("memset", m, val=-1e30)
        k.ins("memset", l, val=0.0)
        k.ins("memset", acc, val=0.0)
        with k.loop("kj", S // 512, par=False) as kj:
            kt = T((128, 512), "bf16")
            s = T((128, 512), "f32", "psum")
            k.ins("load", kt, K[(0, d), (kj * 512, 512)])
            k.ins("memset", s, val=0.0)
            k.ins("matmul", s, q, kt)
            sc = T((128, 512))
            k.ins("act", sc, s, func="copy", scale=d**-0.5)
            mx = T((128, 1))
            k.ins("reduce", mx, sc, op="max")
            mn = T((128, 1))
            k.ins("tt", mn, m, mx, op="max")
            nm = T((128, 1))
            k.ins("ts", nm, mn, op="mul", s=-1.0)
            al = T((128, 1))
            k.ins("act", al, m, func="exp", scale=1.0, bias=nm)
            p = T((128, 512), "bf16")
            rs = T((128, 1))
            k.ins("act", p, sc, func="exp", scale=1.0, bias=nm, accum=rs)
            pv = T((128, d), "f32", "psum")
            k.ins("memset", pv, val=0.0)
            for i in range(4):
                pT = T((128, 128), "bf16")
                k.ins("transpose", pT, p[(0, 128), (i * 128, 128)])
                vt = T((128, d), "bf16")
                k.ins("load", vt, V[(kj * 512 + i * 128, 128), (0, d)])
                k.ins("matmul", pv, pT, vt)
            k.ins("ts", acc, acc, op="mul", s=al)
            k.ins("tt", acc, acc, pv, op="add")
            k.ins("ts", l, l, op="mul", s=al)
            k.ins("tt", l, l, rs, op="add")
            k.ins("act", m, mn, func="copy", scale=1.0)
        r = T((128, 1))
        k.ins("act", r, l, func="recip", scale=1.0)
        o = T((128, d), "bf16")
        k.ins("ts", o, acc, op="mul", s=r)
        k.ins("store", O[(qi * 128, 128), (0, d)], o)
    return k


def k_norm(kind, R=4096, C=2048):
    k = Kern(kind)
    X = k.tensor("x", (R, C), "f32")
    G = k.tensor("g", (128, C), "f32")
    B = k.tensor("b", (128, C), "f32")
    O = k.tensor("out", (R, C), "f32", True)
    T = lambda s, dt="f32": k.tile(s, dt)
    g = T((128, C))
    b = T((128, C))
    if kind != "softmax":
        k.ins("load", g, G.all())
    if kind == "layernorm":
        k.ins("load", b, B.all())
    with k.loop("i", R // 128) as i:
        x = T((128, C))
        k.ins("load", x, X[(i * 128, 128), (0, C)])
        y = T((128, C))
        if kind == "rmsnorm":
            ss = T((128, 1))
            sq = T((128, C))
            k.ins("act", sq, x, func="square", scale=1.0, accum=ss)
            r = T((128, 1))
            k.ins("act", r, ss, func="rsqrt", scale=1.0 / C, bias_c=1e-6)
            k.ins("ts", y, x, op="mul", s=r)
            k.ins("tt", y, y, g, op="mul")
        elif kind == "softmax":
            mx = T((128, 1))
            k.ins("reduce", mx, x, op="max")
            nm = T((128, 1))
            k.ins("ts", nm, mx, op="mul", s=-1.0)
            e = T((128, C))
            k.ins("act", e, x, func="exp", scale=1.0, bias=nm)
            s = T((128, 1))
            k.ins("reduce", s, e, op="add")
            r = T((128, 1))
            k.ins("act", r, s, func="recip", scale=1.0)
            k.ins("ts", y, e, op="mul", s=r)
        else:
            s = T((128, 1))
            k.ins("reduce", s, x, op="add")
            mu = T((128, 1))
            k.ins("ts", mu, s, op="mul", s=-1.0 / C)
            xc = T((128, C))
            k.ins("ts", xc, x, op="add", s=mu)
            ss = T((128, 1))
            sq = T((128, C))
            k.ins("act", sq, xc, func="square", scale=1.0, accum=ss)
            r = T((128, 1))
            k.ins("act", r, ss, func="rsqrt", scale=1.0 / C, bias_c=1e-5)
            k.ins("ts", y, xc, op="mul", s=r)
            k.ins("tt", y, y, g, op="mul")
            k.ins("tt", y, y, b, op="add")
        k.ins("store", O[(i * 128, 128), (0, C)], y)
    return k


def k_add(N=4096):
    k = Kern("add_bf16")
    X = k.tensor("x", (N, N), "bf16")
    Y = k.tensor("y", (N, N), "bf16")
    O = k.tensor("out", (N, N), "bf16", True)
    with k.loop("i", N // 128) as i:
        with k.loop("j", N // 512) as j:
            a = k.tile((128, 512), "bf16")
            b = k.tile((128, 512), "bf16")
            o = k.tile((128, 512), "bf16")
            k.ins("load", a, X[(i * 128, 128), (j * 512, 512)])
            k.ins("load", b, Y[(i * 128, 128), (j * 512, 512)])
            k.ins("tt", o, a, b, op="add")
            k.ins("store", O[(i * 128, 128), (j * 512, 512)], o)
    return k


def k_scan(B=16, T=8192):
    k = Kern("scan")
    X = k.tensor("a", (B * 128, T), "f32")
    Y = k.tensor("b", (B * 128, T), "f32")
    O = k.tensor("out", (B * 128, T), "f32", True)
    with k.loop("i", B) as i:
        a = k.tile((128, T), "f32")
        b = k.tile((128, T), "f32")
        o = k.tile((128, T), "f32")
        k.ins("load", a, X[(i * 128, 128), (0, T)])
        k.ins("load", b, Y[(i * 128, 128), (0, T)])
        k.ins("scan", o, a, b)
        k.ins("store", O[(i * 128, 128), (0, T)], o)
    return k


def k_pool(op, B=8, H=113, W=113, K=3, S=2):
    Ho = (H - K) // S + 1
    k = Kern(op + "pool")
    X = k.tensor("x", (B * 128, H, W), "f32")
    O = k.tensor("out", (B * 128, Ho, Ho), "f32", True)
    with k.loop("i", B) as i:
        a = k.tile((128, H, W), "f32")
        o = k.tile((128, Ho, Ho), "f32")
        k.ins("load", a, X[(i * 128, 128), (0, H), (0, W)])
        k.ins("pool", o, a, op=op, K=K, S=S)
        k.ins("store", O[(i * 128, 128), (0, Ho), (0, Ho)], o)
    return k


def k_tiny(N=4096):
    k = Kern("tiny")
    X = k.tensor("x", (128, N * 4), "f32")
    O = k.tensor("out", (128, N * 4), "f32", True)
    with k.loop("i", N) as i:
        a = k.tile((128, 4), "f32")
        b = k.tile((128, 4), "f32")
        o = k.tile((128, 4), "f32")
        k.ins("load", a, X[(0, 128), (i * 4, 4)])
        k.ins("ts", b, a, op="mul", s=2.5)
        k.ins("tt", o, b, a, op="add")
        k.ins("store", O[(0, 128), (i * 4, 4)], o)
    return k


KERN = {
    "matmul_f32": lambda: k_matmul(dt="f32"),
    "matmul_bf16": lambda: k_matmul(dt="bf16"),
    "flash": k_flash,
    "rmsnorm": lambda: k_norm("rmsnorm"),
    "softmax": lambda: k_norm("softmax"),
    "layernorm": lambda: k_norm("layernorm"),
    "add_bf16": k_add,
    "scan": k_scan,
    "maxpool": lambda: k_pool("max"),
    "avgpool": lambda: k_pool("avg"),
    "tiny": k_tiny,
}


def data(k, seed=0):
    r = np.random.default_rng(seed)
    d = {}
    for n, b in k.hbm.items():
        if getattr(b, "out", False):
            d[n] = np.zeros(b.shape, NPDT[b.dt])
            continue
        x = r.standard_normal(b.shape, dtype=np.float32)
        if k.name == "scan" and n == "a":
            x = 1 / (1 + np.exp(-x))
        d[n] = x.astype(NPDT[b.dt])
    return d


# ---------------------------------------------------------------- strategy 1
F = {
    "copy": lambda x: x,
    "exp": np.exp,
    "square": np.square,
    "recip": lambda x: np.float32(1) / x,
    "rsqrt": lambda x: np.float32(1) / np.sqrt(x),
}
B2 = {"add": np.add, "mul": np.multiply, "max": np.maximum}


class Interp:
    def __init__(s, k):
        s.k = k
        s.D = {n[3:]: getattr(s, n) for n in dir(s) if n.startswith("op_")}

    def run(s, hb):
        s.m = dict(hb)
        s.env = {}
        s.count = 0
        s.blk(s.k.body)

    def blk(s, body):
        for x in body:
            if isinstance(x, Loop):
                for i in range(x.n):
                    s.env[x.var] = i
                    s.blk(x.body)
            else:
                s.count += 1
                s.D[x.op](x)

    def view(s, a):
        if a.buf.space != "hbm" and a.buf.name not in s.m:
            s.m[a.buf.name] = np.full(a.buf.shape, np.nan, NPDT[a.buf.dt])
        return s.m[a.buf.name][tuple(slice(o := off.ev(s.env), o + n * st, st) for off, n, st in a.dims)]

    def rd(s, a):
        v = s.view(a)
        return v if v.dtype == np.float32 else v.astype(np.float32)

    def wr(s, a, v):
        b = a.buf
        if b.space != "hbm":  # fresh tile per instruction unless in-place/partial/accumulating
            if a.shape == b.shape:
                s.m[b.name] = np.array(v, dtype=NPDT[b.dt], copy=True) if v.dtype != NPDT[b.dt] else v
                return
        s.view(a)[...] = v.astype(NPDT[b.dt])

    def op_load(s, x):
        s.wr(x.out, s.view(x.ins[0]).copy())

    def op_store(s, x):
        s.view(x.out)[...] = s.view(x.ins[0])

    def op_memset(s, x):
        s.wr(x.out, np.full(x.out.shape, x.kw["val"], np.float32))

    def op_matmul(s, x):
        s.wr(x.out, s.rd(x.out) + s.rd(x.ins[0]).T @ s.rd(x.ins[1]))

    def op_transpose(s, x):
        s.wr(x.out, s.view(x.ins[0]).T.copy())

    def op_act(s, x):
        v = s.rd(x.ins[0])
        kw = x.kw
        if kw["scale"] != 1.0:
            v = v * np.float32(kw["scale"])
        if "bias" in kw:
            v = v + s.rd(kw["bias"])
        if "bias_c" in kw:
            v = v + np.float32(kw["bias_c"])
        v = F[kw["func"]](v)
        if "accum" in kw:
            s.wr(kw["accum"], v.sum(1, keepdims=True, dtype=np.float32))
        s.wr(x.out, v.copy() if kw["func"] == "copy" else v)

    def op_tt(s, x):
        s.wr(x.out, B2[x.kw["op"]](s.rd(x.ins[0]), s.rd(x.ins[1])))

    def op_ts(s, x):
        c = x.kw["s"]
        c = s.rd(c) if isinstance(c, Acc) else np.float32(c)
        s.wr(x.out, B2[x.kw["op"]](s.rd(x.ins[0]), c))

    def op_reduce(s, x):
        s.wr(x.out, B2[x.kw["op"]].reduce(s.rd(x.ins[0]), axis=1, keepdims=True))

    def op_scan(s, x):
        a = s.rd(x.ins[0])
        b = s.rd(x.ins[1])
        y = np.empty_like(b)
        c = np.zeros(a.shape[0], np.float32)
        for t in range(a.shape[1]):
            c = a[:, t] * c + b[:, t]
            y[:, t] = c
        s.wr(x.out, y)

    def op_pool(s, x):
        v = s.rd(x.ins[0])
        K, S = x.kw["K"], x.kw["S"]
        w = np.lib.stride_tricks.sliding_window_view(v, (K, K), axis=(1, 2))[:, ::S, ::S]
        s.wr(
            x.out,
            w.max((3, 4))
            if x.kw["op"] == "max"
            else (w.sum((3, 4), dtype=np.float32) * np.float32(1 / (K * K))),
        )


if __name__ == "__main__":
    import time

    for n, f in KERN.items():
        k = f()
        d = data(k)
        it = Interp(k)
        it.run(d) if n not in ("scan",) else None
        t = time.perf_counter()
        it.run(d)
        t = time.perf_counter() - t
        print(n, f"{t * 1e3:.1f} ms", it.count, "instr", f"{t / it.count * 1e6:.1f} us/instr")
