package peers;

import com.sun.management.OperatingSystemMXBean;
import java.lang.management.ManagementFactory;
import java.nio.file.Files;
import java.nio.file.Paths;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.Comparator;
import java.util.Locale;
import java.util.Optional;
import java.util.PriorityQueue;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.AggregateFunction;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.api.java.tuple.Tuple4;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.connector.file.sink.FileSink;
import org.apache.flink.connector.file.src.FileSource;
import org.apache.flink.connector.file.src.FileSourceSplit;
import org.apache.flink.connector.file.src.assigners.FileSplitAssigner;
import org.apache.flink.core.fs.Path;
import org.apache.flink.formats.parquet.ParquetColumnarRowInputFormat;
import org.apache.flink.formats.parquet.row.ParquetRowDataBuilder;
import org.apache.flink.streaming.api.datastream.KeyedStream;
import org.apache.flink.streaming.api.datastream.SingleOutputStreamOperator;
import org.apache.flink.streaming.api.datastream.WindowedStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.sink.filesystem.rollingpolicies.OnCheckpointRollingPolicy;
import org.apache.flink.streaming.api.functions.sink.v2.DiscardingSink;
import org.apache.flink.streaming.api.functions.windowing.ProcessWindowFunction;
import org.apache.flink.streaming.api.windowing.assigners.EventTimeSessionWindows;
import org.apache.flink.streaming.api.windowing.assigners.SlidingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.assigners.TumblingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.assigners.WindowAssigner;
import org.apache.flink.streaming.api.windowing.windows.TimeWindow;
import org.apache.flink.table.api.DataTypes;
import org.apache.flink.table.api.Schema;
import org.apache.flink.table.api.bridge.java.StreamTableEnvironment;
import org.apache.flink.table.data.GenericRowData;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.runtime.typeutils.InternalTypeInfo;
import org.apache.flink.table.types.logical.BigIntType;
import org.apache.flink.table.types.logical.DoubleType;
import org.apache.flink.table.types.logical.IntType;
import org.apache.flink.table.types.logical.LogicalType;
import org.apache.flink.table.types.logical.RowType;
import org.apache.flink.util.Collector;
import org.apache.flink.util.OutputTag;

/**
 * A job of the bench on Flink: local MiniCluster in this JVM, two slots, exactly-once checkpoints on disk.
 *
 * <p>{@code FlinkPeer JOB INPUT OUT CHECKPOINT_MILLIS}; JOB is a name of {@code tests.bench.suite}. Results go to OUT/win,
 * late rows to OUT/late. It prints one line of JSON. Time counts from a cluster that has run a trivial job.
 */
public final class FlinkPeer {
    private static final RowType EVENT = rowType(
            new String[] {"source", "seq", "event_time", "key", "value"},
            new IntType(), new BigIntType(), new BigIntType(), new IntType(), new DoubleType());
    private static final RowType RESULT = rowType(
            new String[] {"w", "key", "n", "s"}, new BigIntType(), new IntType(), new BigIntType(), new DoubleType());
    /** What a window needs of a row: event time, key, value, source. */
    private static final TypeInformation<Tuple4<Long, Integer, Double, Integer>> POINT =
            Types.TUPLE(Types.LONG, Types.INT, Types.DOUBLE, Types.INT);
    private static final RowType LATE = rowType(
            new String[] {"event_time", "key", "value", "source"},
            new BigIntType(), new IntType(), new DoubleType(), new IntType());

    /** Files in the order of their names; the stock assigners have another order, in which a third of the rows is late. */
    public static final class InOrder implements FileSplitAssigner {
        private final PriorityQueue<FileSourceSplit> splits = new PriorityQueue<>(
                Comparator.comparing((FileSourceSplit split) -> split.path().toString()).thenComparingLong(FileSourceSplit::offset));

        InOrder(Collection<FileSourceSplit> found) {
            splits.addAll(found);
        }

        @Override
        public Optional<FileSourceSplit> getNext(String host) {
            return Optional.ofNullable(splits.poll());
        }

        @Override
        public void addSplits(Collection<FileSourceSplit> returned) {
            splits.addAll(returned);
        }

        @Override
        public Collection<FileSourceSplit> remainingSplits() {
            return new ArrayList<>(splits);
        }
    }

    /** Count and sum. */
    public static final class CountAndSum
            implements AggregateFunction<Tuple4<Long, Integer, Double, Integer>, Tuple2<Long, Double>, Tuple2<Long, Double>> {
        @Override
        public Tuple2<Long, Double> createAccumulator() {
            return Tuple2.of(0L, 0.0);
        }

        @Override
        public Tuple2<Long, Double> add(Tuple4<Long, Integer, Double, Integer> row, Tuple2<Long, Double> sum) {
            sum.f0++;
            sum.f1 += row.f2;
            return sum;
        }

        @Override
        public Tuple2<Long, Double> getResult(Tuple2<Long, Double> sum) {
            return sum;
        }

        @Override
        public Tuple2<Long, Double> merge(Tuple2<Long, Double> a, Tuple2<Long, Double> b) {
            return Tuple2.of(a.f0 + b.f0, a.f1 + b.f1);
        }
    }

    /** One result row of a window. */
    public static final class ToResult extends ProcessWindowFunction<Tuple2<Long, Double>, RowData, Integer, TimeWindow> {
        @Override
        public void process(Integer key, Context context, Iterable<Tuple2<Long, Double>> sums, Collector<RowData> out) {
            Tuple2<Long, Double> sum = sums.iterator().next();
            out.collect(GenericRowData.of(context.window().getStart() * 1000, key, sum.f0, sum.f1));
        }
    }

    private static RowType rowType(String[] names, LogicalType... types) {
        return RowType.of(types, names);
    }

    private static FileSource<RowData> source(String input) {
        ParquetColumnarRowInputFormat<FileSourceSplit> format = new ParquetColumnarRowInputFormat<>(
                new org.apache.hadoop.conf.Configuration(), EVENT, InternalTypeInfo.of(EVENT), 2048, true, true);
        return FileSource.forBulkFileFormat(format, new Path(input + "/parquet")).setSplitAssigner(InOrder::new).build();
    }

    private static FileSink<RowData> sink(String folder, RowType type) {
        org.apache.hadoop.conf.Configuration options = new org.apache.hadoop.conf.Configuration();
        options.set("parquet.compression", "SNAPPY");
        return FileSink.forBulkFormat(new Path(folder), ParquetRowDataBuilder.createWriterFactory(type, options, true))
                .withRollingPolicy(OnCheckpointRollingPolicy.build()).build();
    }

    private static Configuration configure(String out, String interval) {
        Configuration options = new Configuration();
        options.setString("execution.runtime-mode", "STREAMING");
        options.setString("execution.checkpointing.interval", interval + " ms");
        options.setString("execution.checkpointing.mode", "EXACTLY_ONCE");
        options.setString("execution.checkpointing.dir", out + "/checkpoints");
        options.setString("execution.checkpointing.storage", "filesystem");
        options.setString("state.backend.type", "hashmap");
        options.setString("restart-strategy.type", "none");
        options.setString("pipeline.object-reuse", "true");
        options.setString("table.local-time-zone", "UTC");
        options.setString("taskmanager.memory.managed.size", "512m");
        options.setString("taskmanager.memory.network.min", "128m");
        options.setString("taskmanager.memory.network.max", "128m");
        options.setString("parallelism.default", "2");
        options.setString("taskmanager.numberOfTaskSlots", "2");
        return options;
    }

    private static void runWindows(StreamExecutionEnvironment env, String job, String input, String out) throws Exception {
        WindowAssigner<Object, TimeWindow> windows = switch (job) {
            case "sliding" -> SlidingEventTimeWindows.of(Duration.ofSeconds(60), Duration.ofSeconds(10));
            case "sessions" -> EventTimeSessionWindows.withGap(Duration.ofSeconds(1));
            default -> TumblingEventTimeWindows.of(Duration.ofSeconds(10));
        };
        OutputTag<Tuple4<Long, Integer, Double, Integer>> late = new OutputTag<>("late", POINT);
        KeyedStream<Tuple4<Long, Integer, Double, Integer>, Integer> rows = env
                .fromSource(source(input), WatermarkStrategy.<RowData>forBoundedOutOfOrderness(Duration.ofSeconds(10))
                        .withTimestampAssigner((row, before) -> row.getLong(2) / 1000), "rows")
                .map(row -> Tuple4.of(row.getLong(2), row.getInt(3), row.getDouble(4), row.getInt(0))).returns(POINT)
                .keyBy(row -> row.f1, Types.INT);
        WindowedStream<Tuple4<Long, Integer, Double, Integer>, Integer, TimeWindow> windowed = rows.window(windows);
        if (job.equals("keys")) {
            // It gives a revision for each row that comes after the end of its window.
            windowed = windowed.allowedLateness(Duration.ofMinutes(3));
        }
        TypeInformation<Tuple2<Long, Double>> sum = Types.TUPLE(Types.LONG, Types.DOUBLE);
        SingleOutputStreamOperator<RowData> results = windowed.sideOutputLateData(late)
                .aggregate(new CountAndSum(), new ToResult(), sum, sum, InternalTypeInfo.of(RESULT));
        results.sinkTo(sink(out + "/win", RESULT));
        results.getSideOutput(late).map(row -> (RowData) GenericRowData.of(row.f0, row.f1, row.f2, row.f3))
                .returns(InternalTypeInfo.of(LATE)).sinkTo(sink(out + "/late", LATE));
        env.execute(job);
    }

    /** Flink SQL's own sort of a stream by its time; it drops late rows. */
    private static void runOrder(StreamExecutionEnvironment env, String input, String out) throws Exception {
        StreamTableEnvironment tables = StreamTableEnvironment.create(env);
        tables.createTemporaryView("events", env.fromSource(source(input), WatermarkStrategy.noWatermarks(), "rows"),
                Schema.newBuilder().column("source", DataTypes.INT()).column("seq", DataTypes.BIGINT())
                        .column("event_time", DataTypes.BIGINT()).column("key", DataTypes.INT()).column("value", DataTypes.DOUBLE())
                        .columnByExpression("ts", "TO_TIMESTAMP_LTZ(event_time / 1000, 3)")
                        .watermark("ts", "ts - INTERVAL '10' SECOND").build());
        tables.executeSql("CREATE TABLE sorted (source INT, seq BIGINT, event_time BIGINT, `key` INT, `value` DOUBLE) WITH ("
                + "'connector' = 'filesystem', 'format' = 'parquet', 'parquet.compression' = 'SNAPPY', 'sink.parallelism' = '1',"
                + " 'path' = '" + out + "/win')");
        tables.executeSql("INSERT INTO sorted SELECT source, seq, event_time, `key`, `value` FROM events ORDER BY ts, event_time")
                .await();
    }

    private static double cpuSeconds() {
        return ((OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime() / 1e9;
    }

    private static long peakMegabytes() throws Exception {
        for (String line : Files.readAllLines(Paths.get("/proc/self/status"))) {
            if (line.startsWith("VmHWM")) {
                return Long.parseLong(line.replaceAll("\\D", "")) / 1024;
            }
        }
        return 0;
    }

    public static void main(String[] given) throws Exception {
        String job = given[0], input = "file://" + given[1], out = "file://" + given[2];
        Configuration options = configure(out, given[3]);
        StreamExecutionEnvironment warm = StreamExecutionEnvironment.createLocalEnvironment(2, options);
        warm.fromSequence(1, 10).map(x -> x + 1).returns(Types.LONG).sinkTo(new DiscardingSink<>());
        warm.execute();
        StreamExecutionEnvironment env = StreamExecutionEnvironment.createLocalEnvironment(2, options);
        long begun = System.nanoTime();
        double spent = cpuSeconds();
        switch (job) {
            case "order" -> runOrder(env, input, out);
            case "pass" -> {
                env.fromSource(source(input), WatermarkStrategy.noWatermarks(), "rows").sinkTo(sink(out + "/win", EVENT));
                env.execute(job);
            }
            default -> runWindows(env, job, input, out);
        }
        System.out.printf(Locale.ROOT, "{\"seconds\": %.2f, \"cpu\": %.2f, \"peak_mb\": %d}%n",
                (System.nanoTime() - begun) / 1e9, cpuSeconds() - spent, peakMegabytes());
        System.out.flush();
        System.exit(0);
    }
}
